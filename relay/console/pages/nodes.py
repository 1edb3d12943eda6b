"""`/nodes`: relays, the lanes that each has, and the pools of consumers with their partitions."""

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.console.database import Database
from relay.console.given import Configured, Sessions, Viewer
from relay.console.templates import page
from relay.operate.lanes import LaneStatus, list_lanes
from relay.operate.pool import read_status as read_pools
from relay.operate.status import NodeStatus, list_nodes

router = APIRouter()


@router.get("/nodes")
async def nodes(request: Request, settings: Configured, database: Sessions, _: Viewer) -> HTMLResponse:
    """Show who has what."""
    found, lanes = await run_in_threadpool(_nodes, database)
    return page(request, "nodes.html", nodes=found, lanes=lanes, pools=await read_pools(settings))


def _nodes(database: Database) -> tuple[list[NodeStatus], list[LaneStatus]]:
    with database.session() as tables:
        return list_nodes(tables), list_lanes(tables)
