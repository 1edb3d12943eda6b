"""What a request may send, and within what time.

Nothing is read of a request that changes something before it is known who sends it, but for a short form. Its user's
session may be over, and the answer shows what was sent.
"""

import asyncio
from contextlib import suppress
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relay.console.access.headers import Answer
from relay.console.access.identity import LoginNeededError, RefusedError, door_of
from relay.console.access.writes import ALWAYS, READING, is_from_page
from relay.console.forms import is_form
from relay.errors import OutboxError

MOST_BYTES, MOST_OF_STRANGERS = 1024 * 1024, 16 * 1024  # of a body; strangers send names and passwords alone
BODY_TIMEOUT = 30.0  # seconds for a client to send a body
CLOSE = {"Connection": "close"}
# What a refused client still sends is thrown away before the connection closes. Unread bytes in the kernel would reset
# the connection, and the client would lose the answer.
MOST_DISCARDED, LINGER = 256 * 1024, 1.0  # bytes, seconds


class BoundedApp:
    """The app behind bounds of what requests may send.

    Args:
        answer: makes the answer to a request that is refused.
    """

    def __init__(self, app: ASGIApp, answer: Answer) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, unread)
        most = MOST_OF_STRANGERS if scope["path"] in ALWAYS else MOST_BYTES
        try:
            check_announced(Headers(scope=scope), most)
            await self._identify(request)
        except OutboxError as error:
            if isinstance(error, LoginNeededError) and (answer := await self._answer_form(request, error, receive)):
                await answer(scope, receive, send)
                return
            response = await self._answer(request, error)
            response.headers.update(CLOSE)
            await response(scope, receive, lingering(send, receive))
            return
        await self._app(scope, bounded(receive, most), lingering(send, receive))

    async def _answer_form(self, request: Request, error: LoginNeededError, receive: Receive) -> Response | None:
        """Return the answer to a form of a page that is no longer than a login; None for any other request."""
        is_short = int(request.headers.get("Content-Length", "0")) <= MOST_OF_STRANGERS
        if not is_short or not is_form(request) or not is_from_page(request):
            return None
        with suppress(HTTPException):  # it is longer than announced, or too slow
            return await self._answer(Request(request.scope, bounded(receive, MOST_OF_STRANGERS)), error)
        return None

    async def _identify(self, request: Request) -> None:
        if request.method in READING or request.url.path in ALWAYS:
            return
        if await door_of(request).identify(request) is None:
            raise LoginNeededError


async def unread() -> Message:
    """Receive nothing: the body of a request that is refused by its headers."""
    return {"type": "http.request", "body": b"", "more_body": False}


def check_announced(headers: Headers, most: int) -> None:
    """Refuse a body by its headers.

    Raises:
        RefusedError: it is too long, or in parts, as files are sent: they would be written to the disk.
    """
    if headers.get("Content-Type", "").lower().startswith("multipart/"):
        raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the console takes no request in parts")
    if int(headers.get("Content-Length", "0")) > most:  # the server has looked that it is a number
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_long(most))


def bounded(receive: Receive, most: int) -> Receive:
    """Return `receive` with an end: so many bytes and seconds."""
    ends: float | None = None
    read = 0
    has_all = False

    async def receive_bounded() -> Message:
        nonlocal ends, read, has_all
        if has_all:  # waits for the client to leave
            return await receive()
        if ends is None:
            ends = asyncio.get_running_loop().time() + BODY_TIMEOUT
        try:
            async with asyncio.timeout_at(ends):
                message = await receive()
        except TimeoutError:
            words = f"the request was not sent within {BODY_TIMEOUT:g} s"
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, words, CLOSE) from None
        read += len(message.get("body", b""))
        has_all = not message.get("more_body", False)
        if read > most:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_long(most), CLOSE)
        return message

    return receive_bounded


def lingering(send: Send, receive: Receive) -> Send:
    """Return `send` that ends an answer with `Connection: close` when the client has sent its request, or too much."""
    closes = False

    async def send_lingering(message: Message) -> None:
        nonlocal closes
        if message["type"] == "http.response.start":
            closes = Headers(raw=message["headers"]).get("Connection") == "close"
        elif closes and not message.get("more_body", False):
            await send({**message, "more_body": True})
            await _discard(receive)
            message = {**message, "body": b""}
        await send(message)

    return send_lingering


async def _discard(receive: Receive) -> None:
    left = MOST_DISCARDED
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def too_long(most: int) -> str:
    return f"the request is longer than {most // 1024} KiB"
