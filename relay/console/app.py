"""The console as an ASGI application: routes, access, errors, and what lives as long as the process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware
from starlette.staticfiles import StaticFiles

from relay import __version__
from relay.config.settings import Settings
from relay.console.access.headers import GuardedApp
from relay.console.access.local import identify_local
from relay.console.access.writes import guard_writes, hosts
from relay.console.answers import answer_error
from relay.console.api.router import router as api
from relay.console.database import Database
from relay.console.pages import overview
from relay.console.templates import STATIC
from relay.errors import OutboxError


def make_app(settings: Settings) -> FastAPI:
    """Return the console for these settings.

    `app.state` has `settings`, `database` (Database) and `identify` (Identifier).
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        database.open()
        try:
            yield
        finally:
            database.close()

    database = Database(settings)
    app = FastAPI(
        title="Outbox relay",
        version=__version__,
        docs_url=None,  # they load scripts from other hosts
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        dependencies=[Depends(guard_writes)],
        middleware=[Middleware(GuardedApp, hosts=hosts(settings.console))],
        exception_handlers={OutboxError: answer_error},
    )
    app.state.settings = settings
    app.state.database = database
    app.state.identify = identify_local
    app.include_router(overview.router)
    app.include_router(api)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app
