"""Authentication `none`: a user with the token of this start is an owner, under the name of the process's user.

The token is printed with the console's address, as Jupyter does it. Without it each user of the host, and each of their
processes, could change everything. A browser brings the token once and gets a session for it.
"""

import hmac
import secrets
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from relay.console.access.cookie import browser_of, set_cookie
from relay.console.access.identity import Identity
from relay.console.access.sessions import Sessions
from relay.jobs.job import operator
from relay.operate.operation import Role

PATH, PARAMETER = "/", "token"  # where a browser brings it
WORDS = (
    "this console takes the token of its start: open the address that `relay console` printed when it began."
    " Programs send the token as `Authorization: Bearer`, and `relay --server` takes it from RELAY_TOKEN"
)


class StartToken:
    """A random text that counts as long as this process runs."""

    def __init__(self) -> None:
        self._text = secrets.token_urlsafe(32)

    def address(self, origin: str) -> str:
        """Return what a browser opens first."""
        return f"{origin}{PATH}?{PARAMETER}={self._text}"

    def owner_of(self, token: str) -> Identity | None:
        """Return the user of this host, if it is the token."""
        if hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._text.encode()):
            return Identity(operator(), Role.OWNER)
        return None


class EnteredApp:
    """The app behind a look at the address: a browser that brings the token gets a session, and asks again without."""

    def __init__(self, app: ASGIApp, token: StartToken, sessions: Sessions) -> None:
        self._app = app
        self._token = token
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        owner = self._token.owner_of(request.query_params.get(PARAMETER, ""))
        if owner is None:
            await self._app(scope, receive, send)
            return
        response = RedirectResponse(PATH, HTTPStatus.SEE_OTHER)
        set_cookie(request, response, self._sessions.begin(owner, instead_of=browser_of(request)))
        await response(scope, receive, send)
