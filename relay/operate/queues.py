"""The queues that consumers read: what waits in each, since when nobody reads it, and whether it grows."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relay.config.settings import Settings
from relay.config.topology import QueueType
from relay.consume.queue_depth import QueueDepth
from relay.operate.letters.work import queues_of
from relay.operate.pool import LAGGING
from relay.operate.routes.map import listed_ways
from relay.operate.runbooks import Guided, Runbook

START = "start its consumer"
UNREAD_AFTER = 10.0  # seconds without a consumer, from which on it is no restart
WINDOW = 60.0  # seconds over which growth is measured
GROWN = 1000  # messages that a queue gains in the window; a smaller gain passes by itself


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What is known of a queue.

    Attributes:
        ready: messages that wait.
        unread_s: seconds for which messages have waited without a consumer; 0 while there is one.
        grown: messages more than a minute ago, if each half of the minute saw more than the one before; else 0.
    """

    name: str
    ready: int
    consumers: int
    unread_s: float
    grown: int

    @property
    def is_unread(self) -> bool:
        return self.unread_s >= UNREAD_AFTER

    @property
    def reason(self) -> Guided | None:
        """Why an operator should look at it."""
        if self.ready and not self.consumers:
            return Guided(f"{unread(self.name, self.ready)}: {START}", Runbook.CONSUMER_DOWN)
        if self.ready >= LAGGING:
            return Guided(f"{self.ready:,} messages wait in {self.name}", Runbook.CONSUMER_LAG)
        if self.grown >= GROWN:
            words = f"{self.name} grows: {self.ready:,} messages wait, {self.grown:,} more than a minute ago"
            return Guided(words, Runbook.CONSUMER_LAG)
        return None


def unread(queue: str, ready: int) -> str:
    """Return the words for a queue whose messages nobody consumes."""
    return f"nothing consumes {queue}, and {'1 message waits' if ready == 1 else f'{ready:,} messages wait'}"


def consumed_queues(settings: Settings, noted: Iterable[str] = ()) -> list[str]:
    """Return the queues that the settings name and consumers read, by name: none that keeps what was given up.

    Args:
        noted: queues that consumers have noted, and that belong to them, too.
    """
    queues = settings.topology.queues
    given_up = {queue.dead_letter_routing_key for queue in queues if queue.dead_letter_exchange == ""}
    exchanges = {queue.dead_letter_exchange for queue in queues} - {"", None}
    given_up |= {each.queue for each in settings.topology.bindings if each.exchange in exchanges}
    streams = {queue.name for queue in queues if queue.type is QueueType.STREAM}  # which keep what was read
    named = {way.queue for way in listed_ways(settings) if way.queue} | {*noted}
    return sorted(name for name in named - given_up - streams if queues_of(name)[1] != name)


class Depths:
    """What the looks of the last minute saw of each queue."""

    def __init__(self) -> None:
        self._unread_since: dict[str, float] = {}
        self._looks: dict[str, deque[tuple[float, int]]] = {}

    def note(self, seen: Mapping[str, QueueDepth], now: float) -> list[QueueStatus]:
        """Add a look, and return what is known of the queues in it.

        Args:
            now: monotonic seconds.
        """
        for known in (self._unread_since, self._looks):
            for gone in known.keys() - seen.keys():
                del known[gone]
        return [self._status(name, depth, now) for name, depth in seen.items()]

    def _status(self, name: str, depth: QueueDepth, now: float) -> QueueStatus:
        if depth.ready and not depth.consumers:
            self._unread_since.setdefault(name, now)
        else:
            self._unread_since.pop(name, None)
        looks = self._looks.setdefault(name, deque())
        looks.append((now, depth.ready))
        while looks[0][0] < now - WINDOW:
            looks.popleft()
        unread = now - self._unread_since.get(name, now)
        return QueueStatus(name, depth.ready, depth.consumers, unread, _grown(looks, now))


def _grown(looks: Iterable[tuple[float, int]], now: float) -> int:
    earlier = [ready for at, ready in looks if at <= now - WINDOW / 2]
    later = [ready for at, ready in looks if at > now - WINDOW / 2]
    return later[-1] - min(earlier) if earlier and min(later) > max(earlier) else 0
