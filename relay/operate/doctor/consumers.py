"""Whether anybody consumes the queues that the settings list. A queue of dead letters or a stream needs no consumer."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence

from relay.config.settings import Settings
from relay.consume.queue_depth import QueueDepth, depth_of
from relay.operate import queues
from relay.operate.doctor.broker_hosts import OpenHost
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.queues import START, consumed_queues, unread

CONSUMED = "broker.consumers"
AGAIN = 1.0  # seconds


async def queues_are_consumed(hosts: Sequence[OpenHost], settings: Settings) -> AsyncIterator[Finding]:
    """See that a queue in which messages wait has a consumer; a consumer that restarts gets some seconds."""
    depths = await _ask(hosts[0], settings, consumed_queues(settings))
    ends = time.monotonic() + queues.UNREAD_AFTER
    while (waiting := [queue for queue, depth in depths.items() if _is_unread(depth)]) and time.monotonic() < ends:
        await asyncio.sleep(AGAIN)
        depths |= await _ask(hosts[0], settings, waiting)
    for queue, depth in depths.items():
        if _is_unread(depth):
            yield Finding(CONSUMED, Verdict.FAILED, unread(queue, depth.ready), START)
        elif depth.consumers:
            number = "1 consumer" if depth.consumers == 1 else f"{depth.consumers} consumers"
            yield Finding(CONSUMED, Verdict.OK, f"queue {queue} has {number}")
        else:
            yield Finding(CONSUMED, Verdict.OK, f"queue {queue} has no consumer, and no message waits in it")


def _is_unread(depth: QueueDepth) -> bool:
    return depth.ready > 0 and not depth.consumers


async def _ask(host: OpenHost, settings: Settings, names: Iterable[str]) -> dict[str, QueueDepth]:
    """Return the broker's counts of the queues that are there: `broker.queue` tells of the others."""
    asked = {name: await depth_of(host.connection, name, settings.broker.connect_timeout) for name in names}
    return {name: depth for name, depth in asked.items() if depth is not None}
