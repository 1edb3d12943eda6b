"""Whether a request that changes something comes from a page of the console.

A dependency of the whole app, so that no route can leave it out.
"""

from http import HTTPStatus

from starlette.requests import Request

from relay.config.settings import ConsoleSettings
from relay.console.access.cookie import browser_of, is_form_token
from relay.console.access.identity import RefusedError
from relay.console.access.tokens import bearer_of

READING = frozenset({"GET", "HEAD", "OPTIONS"})
FIELD = "token"  # of a form
HEADER = "X-Relay-Token"  # of a request by a script
ALWAYS = frozenset({"/login", "/logout"})  # not refused in read-only mode

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def origins(console: ConsoleSettings) -> frozenset[str]:
    """Return what browsers may have before the path: `console.origin`, or the names of the loopback address.

    Another name is not answered: one of another site may lead to our address.
    """
    if console.origin:
        return frozenset({console.origin})
    host, _, port = console.listen.rpartition(":")
    return frozenset(f"http://{name}:{port}" for name in {host, *LOOPBACK_NAMES})


async def guard_writes(request: Request) -> None:
    """Refuse a request that changes something, unless one of our pages has sent it.

    Raises:
        RefusedError: its origin is another site, its token is not that of the cookie, or the console is read-only.
    """
    if request.method in READING:
        return
    console: ConsoleSettings = request.app.state.settings.console
    is_login = request.url.path in ALWAYS
    # No browser sends a token of a program by itself, and no program logs in or out: there nobody looks at the token.
    if bearer_of(request) is None or is_login:
        await _check_page(request, console)
    if console.read_only and not is_login:
        raise RefusedError(HTTPStatus.FORBIDDEN, "the console is read-only (console.read_only)")


async def _check_page(request: Request, console: ConsoleSettings) -> None:
    if request.headers.get("Origin") not in origins(console):
        words = "the request does not come from a page of this console; console.origin names where its pages are"
        raise RefusedError(HTTPStatus.FORBIDDEN, words)
    browser = browser_of(request)
    if browser is None or not is_form_token(browser, await _token(request)):
        raise RefusedError(HTTPStatus.FORBIDDEN, "the page is out of date: load it again")


async def _token(request: Request) -> str:
    if HEADER in request.headers:
        return request.headers[HEADER]
    kind = request.headers.get("Content-Type", "").partition(";")[0]
    if kind not in ("application/x-www-form-urlencoded", "multipart/form-data"):
        return ""
    given = (await request.form()).get(FIELD, "")
    return given if isinstance(given, str) else ""
