"""Who has logged in: sessions in memory, which end with the process."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from relay.console.access.cookie import browser_of, new_browser
from relay.console.access.identity import Identity

MOST = 10_000  # the oldest one ends for the next


@dataclass(frozen=True, slots=True)
class Session:
    """A login."""

    identity: Identity
    proof: str  # what the login was checked against; the session ends when it is no longer valid
    ends_at: float


class Sessions:
    """The logins of this process, by the text of the browser's cookie.

    Args:
        timeout: seconds after which a login ends.
        is_valid: whether the proof of a session still holds; asked at each request.
    """

    def __init__(self, timeout: float, is_valid: Callable[[str], bool] = lambda _: True) -> None:
        self._timeout = timeout
        self._is_valid = is_valid
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def begin(self, identity: Identity, *, proof: str = "", instead_of: str | None = None) -> str:
        """Return the cookie of a new session; it is a new one, which nobody can have planted before."""
        self.end(instead_of)
        browser = new_browser()
        self._sessions[browser] = Session(identity, proof, time.monotonic() + self._timeout)
        if len(self._sessions) > MOST:
            self._sessions.popitem(last=False)
        return browser

    def end(self, browser: str | None) -> None:
        """Forget a session, if there is one."""
        self._sessions.pop(browser or "", None)

    async def identify(self, request: Request) -> Identity | None:
        """Return who has logged in with the browser that sends this request."""
        browser = browser_of(request)
        session = self._sessions.get(browser or "")
        if session is None:
            return None
        if session.ends_at <= time.monotonic() or not self._is_valid(session.proof):
            self.end(browser)
            return None
        return session.identity
