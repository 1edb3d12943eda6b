"""How it is doing: status, nodes, pools, the doctor's checklist."""

from typing import Annotated

from fastapi import APIRouter, Query

from relay.console.given import Alone, Operations, Viewer
from relay.operate.asked import Closed, Text
from relay.operate.doctor.finding import Finding, Verdict, worst
from relay.operate.pool import PoolsStatus
from relay.operate.status import Node, Status

router = APIRouter(tags=["state"])


class Checklist(Closed):
    """What the doctor has found."""

    verdict: Verdict
    findings: list[Finding]


@router.get("/status")
def status(operations: Operations, _: Viewer) -> Status:
    """Return the backlog, the parked rows and the relays."""
    return operations.status()


@router.get("/nodes")
def nodes(operations: Operations, _: Viewer) -> list[Node]:
    """Return the relays and their lanes."""
    return operations.nodes()


@router.get("/pool/status")
def pools(
    operations: Operations, _: Viewer, pool: Annotated[tuple[Text, ...], Query(description="All unless given.")] = ()
) -> PoolsStatus:
    """Return the members of each pool, and the holder, the epoch and the lag of each partition."""
    return operations.pools(pool)


@router.get("/doctor")
def doctor(operations: Operations, _: Viewer, _alone: Alone) -> Checklist:
    """Look for what would not work before a message is sent; changes nothing."""
    findings = operations.doctor()
    return Checklist(verdict=worst(findings), findings=findings)
