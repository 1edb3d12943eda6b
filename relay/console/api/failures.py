"""`/failures`: what failed, grouped by its cause."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from relay.console.given import Operations, Operator, Viewer
from relay.operate.asked import MAX_ID, Closed, QueueName, Text
from relay.operations.results import Failures

router = APIRouter(prefix="/failures", tags=["failures"])


class Listing(Closed):
    """Which groups."""

    held: Annotated[bool, Field(description="Also the messages that consumers of this database hold.")] = False
    group: Annotated[Text | None, Field(description="Only the group of this id.")] = None
    limit: Annotated[int, Field(ge=1, le=MAX_ID, description="The largest so many; `total` counts all.")] = 100


class Look(Listing):
    """Which queues to look at, too."""

    queue: Annotated[tuple[QueueName, ...], Field(max_length=10, description="Also the dead letters of these.")]


@router.get("")
def list_(operations: Operations, _: Viewer, asked: Annotated[Listing, Query()]) -> Failures:
    """List groups: parked rows, routes in quarantine, and with `held` what consumers hold."""
    return operations.list_failures((), with_held=asked.held, group=asked.group, limit=asked.limit)


@router.post("/look")
def look(operations: Operations, _: Operator, asked: Look) -> Failures:
    """List groups, those of dead letters included: a look takes letters out of their queue for a moment."""
    return operations.list_failures(asked.queue, with_held=asked.held, group=asked.group, limit=asked.limit)
