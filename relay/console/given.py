"""What routes take: who asks, and the operations on the console's connections."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import psycopg
from fastapi import Depends, Form
from pydantic import AfterValidator, Field, StringConstraints
from starlette.requests import Request

from relay.config.settings import Settings
from relay.console.access.identity import Identity, Role, require
from relay.console.database import INBOX_URL, Database, inbox_of
from relay.console.site import Site, site_of
from relay.engine.session.session import LANES
from relay.errors import BusyError
from relay.jobs.job import Kind
from relay.operate.messages.whereabouts import MAX_ID
from relay.operate.reconcile.ask import ReconcileRequest, ask
from relay.operate.reconcile.report import Report
from relay.operations.local import LocalOperations

ALONE_WITHIN = 10.0  # seconds
QUEUE_NAME = r"^[A-Za-z0-9_.:@#,/+ -]{1,200}$"  # that a request may name

ShortString = Annotated[str, StringConstraints(pattern=r"^[^\u0000]*$", max_length=255)]
GroupId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
Id = Annotated[int, Field(ge=1, le=MAX_ID)]
Lane = Annotated[int, Field(ge=0, lt=LANES)]
# The name of a batch of Spark.
AppId = Annotated[str, StringConstraints(pattern=r"^[^\u0000]+$", max_length=1000)]
Version = Annotated[int, Field(ge=-MAX_ID - 1, le=MAX_ID)]
# PostgreSQL takes no NUL in a text. Empty means that nothing was said.
Words = Annotated[str, AfterValidator(lambda text: text.replace("\0", "").strip()), Field(max_length=500)]
FormWords = Annotated[Words, Form()]

Viewer = Annotated[Identity, Depends(require(Role.VIEWER))]
Operator = Annotated[Identity, Depends(require(Role.OPERATOR))]
Owner = Annotated[Identity, Depends(require(Role.OWNER))]


# What a job does decides who may order it, and who may let it go on.
ROLES = {
    Kind.REPLAY: Role.OPERATOR,
    Kind.RETRY: Role.OPERATOR,
    Kind.ARCHIVE: Role.OPERATOR,
    Kind.RESTORE: Role.OPERATOR,
    Kind.DISCARD: Role.OWNER,
}

Here = Annotated[Site, Depends(site_of)]


async def _settings(site: Here) -> Settings:
    return site.settings


async def _database(site: Here) -> Database:
    return site.database


async def _operations(site: Here) -> LocalOperations:
    return site.operations()


Configured = Annotated[Settings, Depends(_settings)]
Sessions = Annotated[Database, Depends(_database)]
Operations = Annotated[LocalOperations, Depends(_operations)]


async def _alone(site: Here) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(ALONE_WITHIN):
            await site.alone.acquire()
    except TimeoutError:
        raise BusyError("another user's look takes all the console has for such looks: try again in a while") from None
    try:
        yield
    finally:
        site.alone.release()


# Of a route that opens connections beyond the pool: the doctor's, a comparison with the inbox, a look at old days, the
# topology. One at a time for all users, as each takes many seconds and the database's connections. It stands behind the
# role: who may not look does not wait.
Alone = Annotated[None, Depends(_alone)]


def compare_with_inbox(settings: Settings, asked: ReconcileRequest) -> Report:
    """Compare what was sent with what the consumers of the inbox's database have applied; raises as `ask` does."""
    timeout, apart = settings.console.statement_timeout, inbox_of(settings)
    if apart is None:
        return ask(settings.database, settings.database, asked, timeout=timeout, broker=settings.broker).report
    told = ask(settings.database, apart, asked, timeout=timeout, broker=settings.broker, inbox_url=INBOX_URL)
    return told.report


def within(request: Request, connection: psycopg.Connection) -> LocalOperations:
    """Return the operations in the transaction of this session."""
    return site_of(request).operations_in(connection)
