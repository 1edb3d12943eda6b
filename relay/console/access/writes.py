"""Whether a request that changes something comes from a page of the console.

A dependency of the whole app, so that no route can leave it out.
"""

from http import HTTPStatus

from starlette.requests import Request

from relay.config.settings import ConsoleSettings
from relay.console.access.cookie import browser_of
from relay.console.access.identity import RefusedError, door_of
from relay.console.access.tokens import bearer_of

READING = frozenset({"GET", "HEAD", "OPTIONS"})
SAME = "same-origin"
ALWAYS = frozenset({"/login", "/logout"})  # not refused in read-only mode

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def origins(console: ConsoleSettings) -> frozenset[str]:
    """Return what browsers may have before the path: that of `console.origin`, or the names of the loopback address.

    Another name is not answered: one of another site may lead to our address.
    """
    if console.origin:
        return frozenset({console.origin.removesuffix(console.base)})
    host, _, port = console.listen.rpartition(":")
    return frozenset(f"http://{name}:{port}" for name in {host, *LOOPBACK_NAMES})


async def guard_writes(request: Request) -> None:
    """Refuse a request that changes something, unless one of our pages has sent it.

    Raises:
        RefusedError: another site has sent it, it has no cookie of ours, or the console is read-only.
    """
    if request.method in READING:
        return
    is_login = request.url.path in ALWAYS
    # No browser sends a token of a program by itself, and no program logs in or out.
    if bearer_of(request) is None or is_login:
        _check_page(request)
    if door_of(request).console.read_only and not is_login:
        raise RefusedError(HTTPStatus.FORBIDDEN, "the console is read-only (console.read_only)")


def is_from_page(request: Request) -> bool:
    """Whether a page of ours has sent the request, as the browser says."""
    site = request.headers.get("Sec-Fetch-Site", SAME)  # older browsers send the origin alone
    return request.headers.get("Origin") in origins(door_of(request).console) and site == SAME


def _check_page(request: Request) -> None:
    """See that a page of ours has sent it: browsers say from where, and keep the cookie from other sites (`cookie`)."""
    if not is_from_page(request):
        words = "the request does not come from a page of this console; console.origin names where its pages are"
        raise RefusedError(HTTPStatus.FORBIDDEN, words)
    if browser_of(request) is None:
        raise RefusedError(HTTPStatus.FORBIDDEN, "the page is out of date: load it again")
