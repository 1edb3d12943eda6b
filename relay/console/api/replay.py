"""`/replay`: what a replay would send again; `/jobs` has those that were ordered."""

from typing import Annotated

from fastapi import APIRouter, Query

from relay.console.api.parameters import ReplayFilter
from relay.console.given import Operations, Viewer
from relay.operations.results import ReplayPreview

router = APIRouter(prefix="/replay", tags=["replay"])


@router.get("/preview")
def preview(operations: Operations, _: Viewer, asked: Annotated[ReplayFilter, Query()]) -> ReplayPreview:
    """Count exactly what a replay would send, by day."""
    return operations.preview_replay(asked.filter())
