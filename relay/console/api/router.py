"""The routes of `/api/v1`."""

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from relay.console.api import (
    batches,
    dead_letters,
    failures,
    held,
    jobs,
    lanes,
    parked,
    quarantine,
    replay,
    state,
    upkeep,
)
from relay.console.api.openapi import document
from relay.console.given import Viewer

router = APIRouter(prefix="/api/v1", responses={422: {"description": "Unprocessable"}})
for each in (state, lanes, failures, parked, quarantine, dead_letters, held, jobs, replay, batches, upkeep):
    router.include_router(each.router)


@router.get("/openapi.json", include_in_schema=False)
def openapi(_: Viewer) -> Response:
    """Return the OpenAPI document."""
    return Response(orjson.dumps(document(router.routes)), media_type="application/json")
