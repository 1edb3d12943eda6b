"""The routes of `/api/v1`."""

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from relay.console.api import (
    dead_letters,
    failures,
    jobs,
    parked,
    quarantine,
    replay,
    state,
    upkeep,
)
from relay.console.api.openapi import document
from relay.console.api.routes import router_of
from relay.console.given import Viewer

router = APIRouter(prefix="/api/v1", responses={422: {"description": "Unprocessable"}})
for each in (
    state.router,
    router_of("lanes"),
    failures.router,
    parked.router,
    quarantine.router,
    dead_letters.router,
    router_of("held"),
    jobs.router,
    replay.router,
    router_of("batches"),
    upkeep.router,
):
    router.include_router(each)


@router.get("/openapi.json", include_in_schema=False)
def openapi(_: Viewer) -> Response:
    """Return the OpenAPI document."""
    return Response(orjson.dumps(document(router.routes)), media_type="application/json")
