"""Notice what nobody reports: messages are in hand, and none settles.

One look a second, at counters that are kept anyway: a message costs nothing.
"""

import asyncio
import time

from relay.backoff import until_tick
from relay.consume.counters import Counters
from relay.consume.overload import OverloadGate
from relay.logger import get_logger

LOOK_INTERVAL = 1.0  # seconds

log = get_logger("relay.consume")


class StallWatch:
    """Watches a consumer while it has a channel.

    Attributes:
        reason: set while it is stalled. A pause is none, and nor is idleness, however long.
    """

    def __init__(self, counters: Counters, gate: OverloadGate, stall_after: float) -> None:
        self._counters = counters
        self._gate = gate
        self._stall_after = stall_after
        self._settled = 0
        self._settled_at = 0.0
        self.reason: str | None = None

    async def run(self) -> None:
        self._settled_at = time.monotonic()
        try:
            while True:
                self.look(time.monotonic())
                await asyncio.sleep(until_tick(LOOK_INTERVAL))
        finally:
            self.reason = None

    def look(self, now: float) -> None:
        counters = self._counters
        # A held message is in hand without being a delivery, and has settled without being acknowledged.
        in_hand = max(counters.unacknowledged, counters.in_flight)
        settled = counters.acknowledged + counters.applied + counters.failed
        if settled != self._settled or not in_hand or self._gate.overloads:
            self._settled, self._settled_at = settled, now
        if (seconds := now - self._settled_at) > self._stall_after:
            if self.reason is None:
                log.warning("delivery.stalled", waiting=in_hand, seconds=round(seconds, 1))
            self.reason = f"nothing has settled for {seconds:.0f} s, messages in hand: {in_hand}"
        elif self.reason is not None:
            self.reason = None
            log.info("delivery.resumed")
