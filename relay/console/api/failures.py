"""`/failures`: what failed, grouped by its cause."""

from typing import Annotated

from fastapi import APIRouter, Query

from relay.console.api.parameters import QueueName
from relay.console.given import Operations, Viewer
from relay.operations.results import Failures

router = APIRouter(prefix="/failures", tags=["failures"])


@router.get("")
def list_(
    operations: Operations,
    _: Viewer,
    *,
    queue: Annotated[tuple[QueueName, ...], Query(max_length=10, description="Also the dead letters of these.")] = (),
    held: Annotated[bool, Query(description="Also the messages that consumers of this database hold.")] = False,
) -> Failures:
    """List groups: parked rows, routes in quarantine, and what consumers keep."""
    return operations.list_failures(queue, with_held=held)
