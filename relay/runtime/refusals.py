"""How long a server has refused us, for a probe, a metric and a log event."""

import time
from collections.abc import Mapping

from relay.logger import get_logger
from relay.runtime.hindrance import Hindrance

log = get_logger(__name__)


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
