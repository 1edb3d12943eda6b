"""A sender without a broker: its wire records the rows, and the test settles them."""

import asyncio
from collections.abc import Iterable

from relay.config.settings import KeyPolicy, Ordering
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.row import Row, Settled
from relay.engine.send.sender import Sender


class RecordingWire:
    """A wire that sends nowhere; the test settles what it has recorded."""

    def __init__(self) -> None:
        self.sent: list[Row] = []
        self.open: list[Row] = []
        self.redelivered: list[int] = []

    def send(self, rows: Iterable[Row], redelivered: set[int]) -> None:
        for row in rows:
            self.sent.append(row)
            self.open.append(row)
            if row.id in redelivered:
                self.redelivered.append(row.id)

    @property
    def in_flight(self) -> int:
        return len(self.open)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> list[Settled]:
        return []

    def unconfirmed_for(self, now: float) -> float:
        return 0.0 * now

    def sent_before(self, moment: float) -> list[Row]:
        return self.open if moment > 0 else []


def attached(
    *, ordering: Ordering = Ordering.KEY, key_policy: KeyPolicy = KeyPolicy.HOLD, max_in_flight: int = 800
) -> tuple[Sender, RecordingWire]:
    sender, wire = Sender(DeliveryPolicy.of(ordering, key_policy), max_in_flight), RecordingWire()
    sender.attach(wire)
    return sender, wire
