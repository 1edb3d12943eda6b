"""Who has fallen silent."""

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
