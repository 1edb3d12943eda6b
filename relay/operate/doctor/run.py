"""Gather what every part of the checklist found; a relay that becomes ready warns of a part of it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.logger import get_logger
from relay.operate.asked import Closed, Nothing
from relay.operate.doctor.broker import examine_broker
from relay.operate.doctor.database import examine_database
from relay.operate.doctor.finding import Finding, Verdict, worst
from relay.operate.doctor.review import review
from relay.operate.doctor.settings import exposure, memory, routes
from relay.operate.operation import Role, Servers, operation


def examine(settings: Settings, file: Path | None = None) -> list[Finding]:
    """Look at everything, part by part; a part that cannot be reached does not keep the others from being looked at.

    `file` is the relay.toml that was read. Nothing is changed, and no message reaches a queue of yours. It runs event
    loops, so a coroutine calls it in a thread.
    """
    return [
        *exposure(settings, file=file),
        memory(settings.relay),
        *routes(settings),
        *examine_database(settings),
        *asyncio.run(_broker(settings)),
        *review(settings),
    ]


async def _broker(settings: Settings) -> list[Finding]:
    return [finding async for finding in examine_broker(settings)]


class Checklist(Closed):
    """What the doctor has found."""

    verdict: Verdict
    findings: list[Finding]


@operation("doctor", "GET /doctor", Role.VIEWER, is_alone=True)
def doctor(at: Servers, _: Nothing) -> Checklist:
    """Look for what would not work before a message is sent; changes nothing."""
    findings = examine(at.settings, at.file)
    return Checklist(verdict=worst(findings), findings=findings)


log = get_logger(__name__)

READY_POLL = 0.5  # seconds
# Without what the start has refused already, what the relay watches while it runs, and what concerns writers only.
AT_START = frozenset(
    {
        "database.rights",
        "database.owners",
        "database.foreign",
        "database.locks",
        "database.days",
        "database.sequences",
        "database.publications",
        "database.subscriptions",
        "database.connections",
        "database.slots",
        "database.vacuum",
        "database.notifications",
        "database.transaction_ids",
        "database.durability",
        "database.clock",
    }
)


@asynccontextmanager
async def warning(settings: Settings, node: Node) -> AsyncIterator[None]:
    """Look at the memory limit at once and at the database as soon as the node is ready, and log what is wrong.

    The latter in a thread that nobody waits for: neither readiness nor the end of the relay depends on a slow answer.
    """
    ended = threading.Event()
    _warn_of(memory(settings.relay))  # at once: it may be all that is heard of it
    threading.Thread(target=_warn, args=(settings, node, ended), name="doctor", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _warn(settings: Settings, node: Node, ended: threading.Event) -> None:
    while not node.is_ready():
        if ended.wait(READY_POLL):
            return
    for finding in examine_database(settings, only=AT_START):
        if ended.is_set():
            return
        _warn_of(finding)


def _warn_of(finding: Finding) -> None:
    if finding.verdict in {Verdict.WARNING, Verdict.FAILED}:
        log.warning("doctor.warning", check=finding.check, words=finding.words, remedy=finding.remedy)
