"""What keeps this node from delivering, and how long a server has refused it, as the operator reads it."""

import time
from collections.abc import Mapping
from enum import StrEnum

from relay.logger import get_logger
from relay.runtime.hindrance import Hindrance

log = get_logger(__name__)

REFUSED_AFTER = 5.0  # seconds, for what has no `relay.stall_after`
LOGGED_REASONS = 20  # remembered for each part: reasons with a changing number must not fill the memory

# The events of a part: when it ceases to work, and when it works again.
EVENTS = {
    "broker": ("broker.degraded", "broker.healed"),
    "queues": ("queues.degraded", "queues.healed"),
    "database": ("database.degraded", "database.healed"),
    "lanes": ("lanes.degraded", "lanes.healed"),
}

# Some messages wait there while the others go out, or are gone. The operator should look, but the node can deliver.
PARTIAL = frozenset({"queues", "routes", "history"})


class HealthState(StrEnum):
    """The state of a node."""

    OK = "ok"
    DEGRADED = "degraded"  # a part does not work
    STALLED = "stalled"  # messages wait, and no message settles


class ConnectionRefusals:
    """Since when each end ("broker", "database") has answered and refused the connection.

    Args:
        report_after: seconds of refusals after which an operator must act.
    """

    def __init__(self, report_after: float) -> None:
        self._report_after = report_after
        self._since: dict[str, float] = {}
        self._reported: set[str] = set()

    def note(self, end: str, reason: str, *, is_refusal: bool) -> None:
        """Take note of a connection that failed; one that failed in another way ends the refusals."""
        if not is_refusal:
            self.clear(end)
            return
        self._since.setdefault(end, time.monotonic())
        if self._is_long(end) and end not in self._reported:
            self._reported.add(end)
            seconds = round(self.seconds[end], 1)
            if end == "database":
                log.error("database.refused", reason=reason, seconds=seconds)
            else:
                log.error("broker.refused", reason=reason, seconds=seconds)

    def clear(self, end: str) -> None:
        """The end does not refuse us."""
        self._since.pop(end, None)
        self._reported.discard(end)

    @property
    def seconds(self) -> Mapping[str, float]:
        """For how long each end has refused us; 0 when it does not."""
        now = time.monotonic()
        return {end: now - self._since.get(end, now) for end in ("broker", "database")}

    def worded(self, end: str, reason: Hindrance) -> Hindrance:
        """Return the reason; after `report_after` it says for how long the server has refused us."""
        if not self._is_long(end):
            return reason
        public = f"refused for {self.seconds[end]:.0f} s"
        return Hindrance(f"{public}: {reason}", public)

    def _is_long(self, end: str) -> bool:
        return end in self._since and self.seconds[end] >= self._report_after


class Health:
    """Reasons by part ("broker", "database", ...). Without a reason the node is well.

    Args:
        refused_after: seconds of refused connections after which the reason says so.
    Attributes:
        refusals: for how long each end has refused the node.
    """

    def __init__(self, refused_after: float = REFUSED_AFTER) -> None:
        self.refusals = ConnectionRefusals(refused_after)
        self._reasons: dict[str, Hindrance] = {}
        self._expected: dict[str, Hindrance] = {}
        self._logged: dict[str, list[str]] = {}
        self._since: dict[str, float] = {}
        self._stalled: Hindrance | None = None

    def expect(self, part: str, reason: Hindrance) -> None:
        """Note that a part is not ready yet, and that nothing is wrong so far."""
        self._expected[part] = reason

    def degrade(self, part: str, reason: Hindrance, *, is_refusal: bool = False, **more: object) -> None:
        """Note that a part does not work. Each reason is logged once, with `more`, until the part works again.

        Args:
            is_refusal: the server answered, and refused the connection.
        """
        self.refusals.note(part, reason, is_refusal=is_refusal)
        self._reasons[part] = reason
        self._since.setdefault(part, time.monotonic())
        logged = self._logged.setdefault(part, [])
        if reason not in logged:
            logged.append(reason)
            del logged[:-LOGGED_REASONS]
            log.warning(EVENTS[part][0], reason=reason, **more)

    def warn(self, part: str, reason: Hindrance) -> None:
        """Note what the operator must look at; the caller has logged it."""
        self._reasons[part] = reason

    def heal(self, part: str) -> None:
        self._expected.pop(part, None)
        self._logged.pop(part, None)
        self._since.pop(part, None)
        self.refusals.clear(part)
        if self._reasons.pop(part, None) is not None:
            log.info(EVENTS[part][1])

    def degraded_for(self, part: str) -> float:
        """Return the seconds for which a part has not worked; 0 when it works."""
        now = time.monotonic()
        return now - self._since.get(part, now)

    def stall(self, waiting: int, seconds: float) -> None:
        """Note that messages wait, and that no message has settled for this long."""
        if not self._stalled:
            log.warning("delivery.stalled", waiting=waiting, seconds=round(seconds, 1))
        public = f"nothing has settled for {seconds:.0f} s"
        self._stalled = Hindrance(f"{public}, messages that wait: {waiting}", public)

    def move(self) -> None:
        """Note that messages settle again, or that no message waits."""
        if self._stalled:
            self._stalled = None
            log.info("delivery.resumed")

    @property
    def hindrances(self) -> dict[str, Hindrance]:
        """What keeps the node from delivering now, by part; also what is not ready yet."""
        whole = {part: reason for part, reason in self._worded.items() if part not in PARTIAL}
        return self._expected | whole | self._stall

    @property
    def is_stalled(self) -> bool:
        return self._stalled is not None

    @property
    def state(self) -> HealthState:
        if self._stalled:
            return HealthState.STALLED
        return HealthState.DEGRADED if self._reasons else HealthState.OK

    @property
    def reasons(self) -> list[str]:
        return [f"{part}: {reason}" for part, reason in sorted((self._worded | self._stall).items())]

    @property
    def _worded(self) -> dict[str, Hindrance]:
        return {part: self.refusals.worded(part, reason) for part, reason in self._reasons.items()}

    @property
    def _stall(self) -> dict[str, Hindrance]:
        return {"delivery": self._stalled} if self._stalled else {}
