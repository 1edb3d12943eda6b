"""What has fallen silent: a peer that gives no heartbeat, or messages that wait and do not settle."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

Peer = TypeVar("Peer")
Beat = TypeVar("Beat", bound=Hashable)


class Silence:
    """Notices who gives no heartbeat any more, by what we see ourselves: no clock but ours is asked.

    Args:
        timeout: seconds.
        gap: seconds between two looks, at most; after a longer one it was us who stood still, and all begins again.
    """

    def __init__(self, timeout: float, gap: float) -> None:
        self._timeout = timeout
        self._gap = gap
        self._looked_at = 0.0
        self._since: dict[Hashable, float] = {}  # heartbeat -> first seen

    def look(self, beats: Mapping[Beat, Peer], now: float) -> list[Peer]:
        """Return those that have been silent for the time-out, of all by their last heartbeats; `now` is monotonic."""
        before = self._since if now - self._looked_at <= self._gap else {}
        self._looked_at = now
        self._since = {beat: before.get(beat, now) for beat in beats}
        return [peer for beat, peer in beats.items() if now - self._since[beat] >= self._timeout]


class StallTimer:
    """Measures how long messages wait while no message settles.

    Args:
        stall_after: seconds.
    """

    def __init__(self, stall_after: float) -> None:
        self._stall_after = stall_after
        self._settled = 0
        self._settled_at = 0.0

    def restart(self, now: float) -> None:
        self._settled_at = now

    def look(self, settled: int, waiting: int, now: float) -> float | None:
        """Return the seconds since a message settled, or since no message waited, once they exceed `stall_after`.

        Args:
            settled: messages that have settled so far.
            now: monotonic.
        """
        if settled != self._settled or not waiting:
            self._settled, self._settled_at = settled, now
        seconds = now - self._settled_at
        return seconds if seconds > self._stall_after else None
