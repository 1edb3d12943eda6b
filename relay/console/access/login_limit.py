"""How often a login may fail: by the client's network, by the name from there, and by the name from anywhere."""

import math
import time
from collections import OrderedDict, deque
from http import HTTPStatus
from ipaddress import ip_network

from relay.console.access.identity import RefusedError

WINDOW = 300.0  # seconds
MOST_BY_NETWORK = 20  # failures in a window; a few people may share an address
MOST_BY_NAME = 10  # from one network
MOST_BY_STRANGERS = 100  # of a name, from networks where it has never logged in
MOST_REMEMBERED = 10_000  # of each kind; the oldest one is forgotten for the next
HOST_BITS = 64  # of an IPv6 address, which its user may choose

Key = tuple[str, ...]


class LoginLimit:
    """The failures of the last minutes.

    Failures of strangers do not lock a user out of networks where they have logged in before: there only failures from
    that network count.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[Key, deque[float]] = OrderedDict()
        self._known: OrderedDict[Key, None] = OrderedDict()  # (network, name) of logins that have succeeded

    def check(self, address: str, name: str) -> None:
        """Let a login be tried, unless too many have failed.

        Raises:
            RefusedError: too many; tells when to try again.
        """
        if (wait := max(self._wait(key, most) for key, most in self._counted(address, name))) > 0:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS, f"too many logins have failed: try again in {math.ceil(wait)} s"
            )

    def count(self, address: str, name: str) -> None:
        """Count a try, which may fail."""
        for key, _ in self._counted(address, name):
            self._failures.setdefault(key, deque()).append(time.monotonic())
            self._failures.move_to_end(key)
        while len(self._failures) > MOST_REMEMBERED:
            self._failures.popitem(last=False)

    def forgive(self, address: str, name: str) -> None:
        """Take back what was counted for a login that has succeeded."""
        for key, _ in self._counted(address, name):
            if failures := self._failures.get(key):
                failures.pop()
        self._known[network_of(address), name] = None
        self._known.move_to_end((network_of(address), name))
        while len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)

    def _counted(self, address: str, name: str) -> list[tuple[Key, int]]:
        """Return what a try from there is counted by, and how many failures each may have."""
        network = network_of(address)
        keys = [(("network", network), MOST_BY_NETWORK), (("name", network, name), MOST_BY_NAME)]
        return keys if (network, name) in self._known else [*keys, (("strangers", name), MOST_BY_STRANGERS)]

    def _wait(self, key: Key, most: int) -> float:
        """Return the seconds until the next try."""
        now, failures = time.monotonic(), self._failures.get(key, deque())
        while failures and failures[0] <= now - WINDOW:
            failures.popleft()
        return failures[-most] + WINDOW - now if len(failures) >= most else 0.0


def network_of(address: str) -> str:
    """Return whose address it is: all that one user of IPv6 may choose are one."""
    try:
        return str(ip_network(f"{address}/{HOST_BITS}" if ":" in address else address, strict=False))
    except ValueError:  # a proxy's word
        return address
