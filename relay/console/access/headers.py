"""What stands before every route: the names that are answered, and the headers of every answer."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# No inline script and no inline style: what a message says cannot become either.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",  # with `no-referrer` browsers hide the origin of a form
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
BY_HTTPS = {"Strict-Transport-Security": "max-age=31536000"}
KEPT = "Cache-Control"
NO_PAGES = ("/api/", "/live")
# Such a request is the last one of its connection. A proxy that sees its end elsewhere would take for its body what we
# take for the next request.
CHUNKED = "Transfer-Encoding"

Answer = Callable[[Request, Exception], Awaitable[Response]]


class GuardedApp:
    """The app behind a check of the header Host, with our headers on each of its answers.

    Args:
        answer_bug: makes the answer to a request in which the app has failed.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[str], answer_bug: Answer) -> None:
        self._app = app
        self._answer_bug = answer_bug
        self._hosts = {urlsplit(origin).netloc for origin in origins}
        is_https = all(origin.startswith("https:") for origin in origins)
        self._headers = HEADERS | BY_HTTPS if is_https else HEADERS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        headers = Headers(scope=scope)
        has_begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered.update(self._headers)
                answered.setdefault(KEPT, "no-store")
                if CHUNKED in headers:
                    answered["Connection"] = "close"
            await send(message)

        if CHUNKED in headers and "Content-Length" in headers:
            words = "a request has a length or comes in chunks, and not both\n"
            await PlainTextResponse(words, HTTPStatus.BAD_REQUEST)(scope, receive, send_guarded)
            return
        if is_of_another_site(headers, scope["path"]):
            words = "a page of another site may lead to a page of the console, and ask it nothing\n"
            await PlainTextResponse(words, HTTPStatus.FORBIDDEN)(scope, receive, send_guarded)
            return
        if headers.get("Host") not in self._hosts:
            words = "this console has another name: console.origin says which\n"
            await PlainTextResponse(words, HTTPStatus.MISDIRECTED_REQUEST)(scope, receive, send_guarded)
            return
        try:
            await self._app(scope, receive, send_guarded)
        except Exception as error:
            if has_begun:
                raise
            response = await self._answer_bug(Request(scope), error)
            await response(scope, receive, send_guarded)


def is_of_another_site(headers: Headers, path: str) -> bool:
    """Whether a browser sends a request for a page of another site, and not because its user goes to a page of ours."""
    if headers.get("Sec-Fetch-Site") not in ("cross-site", "same-site"):
        return False
    is_visit = (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == ("navigate", "document")
    return not is_visit or path.startswith(NO_PAGES)
