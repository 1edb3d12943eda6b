"""What routes take: who asks, and what the console has."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Form
from starlette.requests import Request

from relay.config.settings import Settings
from relay.console.access.identity import Identity, require
from relay.console.database import INBOX_URL, Database, inbox_of
from relay.console.forms import FORM, PAGE, TOKEN, check_token
from relay.console.repeats import Repeatable
from relay.console.site import Site, site_of
from relay.errors import BusyError
from relay.operate.asked import Words
from relay.operate.operation import Role
from relay.operate.reconcile.ask import ReconcileRequest, ask
from relay.operate.reconcile.report import ReconcileReport

ALONE_WITHIN = 10.0  # seconds

FormWords = Annotated[Words, Form()]

Viewer = Annotated[Identity, Depends(require(Role.VIEWER))]
Operator = Annotated[Identity, Depends(require(Role.OPERATOR))]
Owner = Annotated[Identity, Depends(require(Role.OWNER))]


Here = Annotated[Site, Depends(site_of)]


async def _settings(site: Here) -> Settings:
    return site.settings


async def _database(site: Here) -> Database:
    return site.database


Configured = Annotated[Settings, Depends(_settings)]
Sessions = Annotated[Database, Depends(_database)]


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


async def _once(request: Request) -> Repeatable | None:
    sent = (await request.form()).multi_items()
    token = next((str(value) for name, value in sent if name == TOKEN), None)
    if token is None:
        return None
    said = sorted((name, str(value)) for name, value in sent if name not in (PAGE, FORM, TOKEN))
    return Repeatable(check_token(token), hashlib.sha256(repr((request.url.path, said)).encode()).digest())


# A form by which it is known when it comes twice; None: it names no token.
Once = Annotated[Repeatable | None, Depends(_once)]


def compare_with_inbox(settings: Settings, asked: ReconcileRequest) -> ReconcileReport:
    """Compare what was sent with what the consumers of the inbox's database have applied; raises as `ask` does."""
    timeout, apart = settings.console.statement_timeout, inbox_of(settings)
    if apart is None:
        return ask(settings.database, settings.database, asked, timeout=timeout, broker=settings.broker).report
    told = ask(settings.database, apart, asked, timeout=timeout, broker=settings.broker, inbox_url=INBOX_URL)
    return told.report
