"""What a relay that has just become ready warns of: it works, and an operator should know."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.logger import get_logger
from relay.operate.doctor.database import examine_database
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.memory import memory

log = get_logger(__name__)

LOOK_INTERVAL = 0.5  # seconds; until it is ready
# Without what the start has refused already, what the relay watches while it runs, and what concerns writers only.
AT_START = frozenset(
    {
        "database.rights",
        "database.owners",
        "database.foreign",
        "database.locks",
        "database.days",
        "database.publications",
        "database.connections",
        "database.slots",
        "database.vacuum",
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
    _tell(memory(settings.relay))  # at once: it may be all that is heard of it
    threading.Thread(target=_warn, args=(settings, node, ended), name="doctor", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _warn(settings: Settings, node: Node, ended: threading.Event) -> None:
    while not node.is_ready():
        if ended.wait(LOOK_INTERVAL):
            return
    for finding in examine_database(settings, only=AT_START):
        if ended.is_set():
            return
        _tell(finding)


def _tell(finding: Finding) -> None:
    if finding.verdict in {Verdict.WARNING, Verdict.FAILED}:
        log.warning("doctor.warning", check=finding.check, words=finding.words, remedy=finding.remedy)
