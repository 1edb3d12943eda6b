"""The routes of `/api/v1`."""

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from relay.console.api import dead_letters, upkeep
from relay.console.api.openapi import document
from relay.console.api.routes import router_of
from relay.console.given import Configured, Viewer

router = APIRouter(prefix="/api/v1", responses={422: {"description": "Unprocessable"}})
for each in (
    router_of("state"),
    router_of("lanes"),
    router_of("failures"),
    router_of("parked"),
    router_of("quarantine"),
    router_of("dead-letters"),
    dead_letters.router,
    router_of("held"),
    router_of("jobs"),
    router_of("replay"),
    router_of("batches"),
    router_of("audit"),
    upkeep.router,
    router_of("topology"),
):
    router.include_router(each)


@router.get("/openapi.json", include_in_schema=False)
def openapi(settings: Configured, _: Viewer) -> Response:
    """Return the OpenAPI document."""
    base = settings.console.base
    servers = {"servers": [{"url": base}]} if base else {}
    return Response(orjson.dumps(document(router.routes) | servers), media_type="application/json")
