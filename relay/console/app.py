"""The console as an ASGI application: routes, access, errors, and what lives as long as the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.staticfiles import StaticFiles

from relay import __version__
from relay.config.settings import Settings
from relay.console.access.access import Access
from relay.console.access.bounds import BoundedApp
from relay.console.access.headers import GuardedApp
from relay.console.access.start_token import EnteredApp
from relay.console.access.tokens import TokenFile, with_tokens
from relay.console.access.writes import guard_writes, origins
from relay.console.answers import answer_bug, answer_error, answer_http_error, answer_invalid
from relay.console.api.router import router as api
from relay.console.background import Background
from relay.console.checkup import Checkup
from relay.console.consumers import Consumers
from relay.console.database import INBOX_URL, Database, inbox_of
from relay.console.failure_groups import FailureGroups
from relay.console.given import operations_of
from relay.console.looks import Looks
from relay.console.pages import (
    audit,
    doctor,
    failures,
    jobs,
    login,
    messages,
    nodes,
    overview,
    reconcile,
    replay,
    routes,
    upkeep,
)
from relay.console.runner import Runner
from relay.console.sampler import Sampler
from relay.console.templates import STATIC
from relay.errors import OutboxError
from relay.operate.routes.map import read_route_map
from relay.probes.cached_answer import CachedAnswer

ROUTE_MAP_PATIENCE = 0.2  # seconds that a page waits for the broker; then it shows what was seen before


def make_app(settings: Settings, file: Path | None = None) -> FastAPI:
    """Return the console for these settings.

    `app.state` has `settings`, `database` and `inbox` (Database), `sampler` (Sampler), `checkup` (Checkup), `runner`
    (Runner), `background` (Background), `alone` (Lock) and `access` (Access). It also has `consumers` (Consumers),
    `looks` (Looks), `failure_groups` (FailureGroups) and `route_map` (CachedAnswer of a RouteMap). `identify` is an
    Identifier, and `file` the relay.toml that was read, for the doctor.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for each in {database, inbox}:  # often the same
            each.open()
        runs = {"sampler": sampler.run, "checkup": checkup.run, "consumers": consumers.run, "looks": looks.run}
        tasks = [asyncio.create_task(background.keep(name, run), name=name) for name, run in runs.items()]
        running = asyncio.create_task(background.keep("jobs", runner.run), name="jobs")
        try:
            yield
        finally:
            runner.stop()
            for task in tasks:
                task.cancel()
            await asyncio.wait([*tasks, running])
            await route_map.close()
            await failure_groups.close()
            for each in {database, inbox}:
                each.close()

    database, access = Database(settings.database, settings.console), Access(settings.console)
    apart = inbox_of(settings)
    inbox = Database(apart, settings.console, url=INBOX_URL) if apart else database
    background = Background()
    sampler, checkup = Sampler(settings, database), Checkup(settings, file)
    runner = Runner(settings, partial(background.note, "jobs"))
    route_map = CachedAnswer(lambda: read_route_map(settings), patience=ROUTE_MAP_PATIENCE)
    consumers, looks = Consumers(settings, database), Looks(settings.broker)
    operations = operations_of(settings, file, database)
    failure_groups = FailureGroups(lambda: operations.list_failures((), with_held=True).groups)
    tokens = [TokenFile(settings.console.tokens).owner_of]
    entrance = []
    if access.start is not None:
        tokens.insert(0, access.start.owner_of)
        entrance.append(Middleware(EnteredApp, token=access.start, sessions=access.sessions))
    app = FastAPI(
        title="Outbox relay",
        version=__version__,
        docs_url=None,  # they load scripts from other hosts
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # it would lead to http, also behind a proxy with a certificate
        lifespan=lifespan,
        dependencies=[Depends(guard_writes)],
        middleware=[
            Middleware(GuardedApp, origins=origins(settings.console), answer_bug=answer_bug),
            *entrance,
            Middleware(BoundedApp, answer=answer_error),
        ],
        exception_handlers={
            OutboxError: answer_error,
            HTTPException: answer_http_error,
            RequestValidationError: answer_invalid,
        },
    )
    app.state.settings = settings
    app.state.file = file
    app.state.database = database
    app.state.inbox = inbox
    app.state.sampler = sampler
    app.state.checkup = checkup
    app.state.runner = runner
    app.state.background = background
    app.state.alone = asyncio.Lock()
    app.state.route_map = route_map
    app.state.failure_groups = failure_groups
    app.state.consumers = consumers
    app.state.looks = looks
    app.state.access = access
    app.state.identify = with_tokens(access.identify, *tokens)
    for each in (login, overview, messages, failures, jobs, replay, reconcile, routes, nodes, upkeep, doctor, audit):
        app.include_router(each.router)
    app.include_router(api)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app
