"""The main job on one page: rows are read, sent, confirmed and marked.

tail ──window──> gate ──rows──> sender ──frames──> broker
  ^                               │ <──confirms────────┘
  └──forget── marker <────────────┘ settled rows
"""

import asyncio

from relay.engine.read.gate import Gate
from relay.engine.read.tail import Tail
from relay.engine.send.sender import Sender
from relay.engine.settle.mark import Marker
from relay.engine.settle.parking import Parking
from relay.engine.settle.quarantine import Quarantine


async def forward(
    tail: Tail,
    gate: Gate,
    sender: Sender,
    *,
    parking: Parking,
    quarantine: Quarantine,
    marker: Marker,
    drain: asyncio.Event,
) -> None:
    """Carry pending rows to the broker until `drain` is set.

    On return every row that was read is marked, put away or still pending. What was sent is settled and written; what
    was only read is left for the next run.
    After a cancel, or when the session is lost, rows in flight stay pending and go out again, as after a crash. A drain
    that takes too long ends in that way.
    """
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(marker.run(), name="mark")
        async for window in tail.windows(until=drain):  # sleeps while idle, waits for room
            rows = await gate.admit(window, parking, quarantine)
            sender.offer(rows, behind=tail.behind)
            del window[:], rows[:]  # otherwise they stay in memory, long settled, while the next rows are read
            await quarantine.tend()
        sender.stop()
