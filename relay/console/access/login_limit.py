"""How often a login may fail: by the client's address, and by the name that is tried."""

import math
import time
from collections import OrderedDict, deque
from http import HTTPStatus

from relay.console.access.identity import RefusedError

WINDOW = 300.0  # seconds
MOST_BY_ADDRESS = 20  # failures in a window; a few people may share an address
MOST_BY_NAME = 10
MOST_REMEMBERED = 10_000  # addresses and names; the oldest one is forgotten for the next


class LoginLimit:
    """The failures of the last minutes."""

    def __init__(self) -> None:
        self._failures: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()

    def check(self, address: str, name: str) -> None:
        """Let a login be tried, unless too many have failed.

        Raises:
            RefusedError: too many; tells when to try again.
        """
        waits = [
            self._wait(("address", address), MOST_BY_ADDRESS),
            self._wait(("name", name), MOST_BY_NAME),
        ]
        if (wait := max(waits)) > 0:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS, f"too many logins have failed: try again in {math.ceil(wait)} s"
            )

    def count(self, address: str, name: str) -> None:
        """Count a try, which may fail."""
        for key in (("address", address), ("name", name)):
            self._failures.setdefault(key, deque()).append(time.monotonic())
            self._failures.move_to_end(key)
        while len(self._failures) > MOST_REMEMBERED:
            self._failures.popitem(last=False)

    def forgive(self, address: str, name: str) -> None:
        """Take back what was counted for a login that has succeeded."""
        for key in (("address", address), ("name", name)):
            if failures := self._failures.get(key):
                failures.pop()

    def _wait(self, key: tuple[str, str], most: int) -> float:
        """Return the seconds until the next try."""
        now, failures = time.monotonic(), self._failures.get(key, deque())
        while failures and failures[0] <= now - WINDOW:
            failures.popleft()
        return failures[-most] + WINDOW - now if len(failures) >= most else 0.0
