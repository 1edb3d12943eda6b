"""`/batches`: what Spark has written, and the end of what it has begun."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Once
from relay.console.api.parameters import Limit, Reasoned
from relay.console.given import AppId, Operations, Operator, Version, Viewer, within
from relay.operate.batches import BatchStatus

router = APIRouter(prefix="/batches", tags=["batches"])


class GiveUp(Reasoned):
    """Which batch is given up, and why."""

    app_id: AppId
    version: Version


@router.get("")
def list_(operations: Operations, _: Viewer, limit: Limit = 20) -> list[BatchStatus]:
    """List the newest batches: first those that are begun and not committed."""
    return operations.list_batches(limit=limit)


@router.get("/show")
def show(
    operations: Operations, _: Viewer, app_id: Annotated[AppId, Query()], version: Annotated[Version, Query()]
) -> BatchStatus:
    """Show one batch."""
    return operations.show_batch(app_id, version)


@router.post("/give-up", response_model=BatchStatus)
def give_up(request: Request, once: Once, who: Operator, asked: GiveUp) -> Response:
    """Let no more of a batch be written, which was begun in pieces; what is written stays."""
    return once.in_transaction(
        who.name,
        BatchStatus,
        lambda connection: within(request, connection).give_up_batch(
            asked.app_id, asked.version, by=who.name, why=asked.why
        ),
    )
