"""`/nodes`: relays, the lanes that each has, and the pools of consumers with their partitions."""

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.config.settings import Settings
from relay.console.access.identity import Identity, Role, require
from relay.console.database import Database
from relay.console.templates import page
from relay.operate.pool import read_status as read_pools
from relay.operate.status import LANES, Node, list_nodes

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane, and the relay that has it; None when no relay does."""

    number: int
    node: str | None


@router.get("/nodes")
async def nodes(request: Request, _: Annotated[Identity, Depends(require(Role.VIEWER))]) -> HTMLResponse:
    """Show who has what."""
    settings = cast(Settings, request.app.state.settings)
    found = await run_in_threadpool(_nodes, cast(Database, request.app.state.database))
    holders = {lane: node.name for node in found if node.alive for lane in node.lanes}
    lanes = [Lane(number, holders.get(number)) for number in range(LANES)]
    return page(request, "nodes.html", nodes=found, lanes=lanes, pools=await read_pools(settings))


def _nodes(database: Database) -> list[Node]:
    with database.session() as connection:
        return list_nodes(connection, database.schema)
