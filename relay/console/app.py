"""The console as an ASGI application: routes, access and errors."""

from pathlib import Path

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.staticfiles import StaticFiles

from relay import __version__
from relay.config.settings import Settings
from relay.console.access.below import BelowApp
from relay.console.access.bounds import BoundedApp
from relay.console.access.headers import GuardedApp
from relay.console.access.start_token import EnteredApp
from relay.console.access.writes import guard_writes, origins
from relay.console.answers import answer_bug, answer_error, answer_http_error, answer_invalid
from relay.console.api.router import router as api
from relay.console.pages import (
    audit,
    consumers,
    doctor,
    failures,
    icon,
    jobs,
    login,
    message_edit,
    messages,
    nodes,
    overview,
    reconcile,
    replay,
    restore,
    routes,
    runbooks,
    upkeep,
)
from relay.console.site import Site
from relay.console.templates import STATIC
from relay.errors import OutboxError

PAGES = (
    login,
    icon,
    overview,
    messages,
    message_edit,
    failures,
    jobs,
    restore,
    replay,
    reconcile,
    routes,
    upkeep,
    nodes,
    consumers,
    doctor,
    audit,
    runbooks,
)


def make_app(settings: Settings, file: Path | None = None) -> FastAPI:
    """Return the console for these settings; `app.state.site` has what its requests share."""
    site = Site(settings, file)
    access, entrance, below = site.access, [], []
    if base := settings.console.base:
        below.append(Middleware(BelowApp, base=base))
    if access.start is not None:
        entrance.append(Middleware(EnteredApp, token=access.start, sessions=access.sessions))
    app = FastAPI(
        title="Outbox relay",
        version=__version__,
        docs_url=None,  # they load scripts from other hosts
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # it would lead to http, also behind a proxy with a certificate
        lifespan=site.running,
        dependencies=[Depends(guard_writes)],
        middleware=[
            *below,
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
    app.state.site = site
    for each in PAGES:
        app.include_router(each.router)
    app.include_router(api)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app
