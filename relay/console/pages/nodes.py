"""`/nodes`: relays, the lanes that each has, and the pools of consumers with their partitions."""

from typing import Annotated, cast

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.config.settings import Settings
from relay.console.access.identity import Identity, Role, require
from relay.console.database import Database
from relay.console.templates import page
from relay.operate.pauses import LaneStatus, list_lanes
from relay.operate.pool import read_status as read_pools
from relay.operate.status import Node, list_nodes

router = APIRouter()


@router.get("/nodes")
async def nodes(request: Request, _: Annotated[Identity, Depends(require(Role.VIEWER))]) -> HTMLResponse:
    """Show who has what."""
    settings = cast(Settings, request.app.state.settings)
    found, lanes = await run_in_threadpool(_nodes, cast(Database, request.app.state.database))
    return page(request, "nodes.html", nodes=found, lanes=lanes, pools=await read_pools(settings))


def _nodes(database: Database) -> tuple[list[Node], list[LaneStatus]]:
    with database.session() as connection:
        return list_nodes(connection, database.schema), list_lanes(connection, database.schema)
