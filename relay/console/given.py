"""What routes take: who asks, and the operations on the console's connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import psycopg
from fastapi import Depends, Form
from starlette.requests import Request

from relay.config.settings import Settings
from relay.console.access.identity import Identity, require
from relay.console.database import INBOX_URL, Database, inbox_of
from relay.errors import BusyError
from relay.jobs.job import Kind
from relay.operate.asked import Words
from relay.operate.operation import Here, Role
from relay.operate.reconcile.ask import Asked, ask
from relay.operate.reconcile.report import Report
from relay.operations.local import LocalOperations

ALONE_WITHIN = 10.0  # seconds

FormWords = Annotated[Words, Form()]

Viewer = Annotated[Identity, Depends(require(Role.VIEWER))]
Operator = Annotated[Identity, Depends(require(Role.OPERATOR))]
Owner = Annotated[Identity, Depends(require(Role.OWNER))]


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


# What a job does decides who may order it, and who may let it go on.
ROLES = {
    Kind.REPLAY: Role.OPERATOR,
    Kind.RETRY: Role.OPERATOR,
    Kind.ARCHIVE: Role.OPERATOR,
    Kind.RESTORE: Role.OPERATOR,
    Kind.DISCARD: Role.OWNER,
}

Configured = Annotated[Settings, Depends(_settings)]


def _sessions(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


Sessions = Annotated[Database, Depends(_sessions)]


def _operations(request: Request) -> LocalOperations:
    state = request.app.state
    return operations_of(state.settings, state.file, state.database)


def operations_of(settings: Settings, file: Path | None, database: Database) -> LocalOperations:
    """Return the operations on the console's connections: statements end after console.statement_timeout."""
    return LocalOperations(settings, file, connect=lambda _: database.session(), by_console=True)


Operations = Annotated[LocalOperations, Depends(_operations)]


def here_of(request: Request, who: Identity) -> Here:
    """Return where an operation is done for a user: on the console's connections."""
    state = request.app.state
    database: Database = state.database
    return Here(
        state.settings,
        lambda _: database.session(),
        file=state.file,
        by=who.name,
        by_console=True,
        require=who.require,
    )


def wake_runner(request: Request) -> None:
    """Let the console look for jobs now."""
    request.app.state.runner.wake()


async def _alone(request: Request) -> AsyncIterator[None]:
    alone: asyncio.Lock = request.app.state.alone
    try:
        async with asyncio.timeout(ALONE_WITHIN):
            await alone.acquire()
    except TimeoutError:
        raise BusyError("another user's look takes all the console has for such looks: try again in a while") from None
    try:
        yield
    finally:
        alone.release()


# Of a route that opens connections beyond the pool: the doctor's, a comparison with the inbox, a look at old days, the
# topology. One at a time for all users, as each takes many seconds and the database's connections. It stands behind the
# role: who may not look does not wait.
Alone = Annotated[None, Depends(_alone)]


def compare_with_inbox(settings: Settings, asked: Asked) -> Report:
    """Compare what was sent with what the consumers of the inbox's database have applied; raises as `ask` does."""
    timeout, apart = settings.console.statement_timeout, inbox_of(settings)
    if apart is None:
        return ask(settings.database, settings.database, asked, timeout=timeout, broker=settings.broker).report
    told = ask(settings.database, apart, asked, timeout=timeout, broker=settings.broker, inbox_url=INBOX_URL)
    return told.report


def within(request: Request, connection: psycopg.Connection) -> LocalOperations:
    """Return the operations in the transaction of this session."""
    state = request.app.state
    return LocalOperations(state.settings, state.file, connect=lambda _: nullcontext(connection))
