"""Errors as answers: a page for a browser, a problem document for the API.

A form that could not be done is answered by the page that it was sent from, where it stands as it was sent.
"""

from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote, unquote

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import Message, Receive, Scope, Send

from relay.config.settings import Authentication
from relay.console.access.identity import LoginNeededError, RefusedError
from relay.console.access.start_token import WORDS
from relay.console.access.writes import is_from_page
from relay.console.forms import InputError, Returned, address_of, sent_form
from relay.console.site import site_of
from relay.console.templates import landing, page
from relay.errors import (
    AccessError,
    BusyError,
    DeadlineError,
    NotFoundError,
    OutboxError,
    PartlyDoneError,
    SchemaError,
    UnavailableError,
    UsageError,
)
from relay.logger import get_logger
from relay.runtime.scrub import scrub

log = get_logger(__name__)

API = "/api/"
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="outbox relay"'}  # no browser asks its user for a bearer token
TO_BE_MENDED = frozenset(  # statuses of what an operator mends in the form, or may send again
    {
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
LIVE = "/live"  # the stream of figures, which no page is
NO_PAGES = (API, LIVE, "/static/")
STATUSES: dict[type[OutboxError], HTTPStatus] = {
    NotFoundError: HTTPStatus.NOT_FOUND,
    UsageError: HTTPStatus.UNPROCESSABLE_ENTITY,
    BusyError: HTTPStatus.CONFLICT,
    DeadlineError: HTTPStatus.GATEWAY_TIMEOUT,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    SchemaError: HTTPStatus.SERVICE_UNAVAILABLE,
    AccessError: HTTPStatus.SERVICE_UNAVAILABLE,
    PartlyDoneError: HTTPStatus.SERVICE_UNAVAILABLE,
}


async def answer_error(request: Request, error: Exception) -> Response:
    """Return what is answered to a request that failed with an error of ours."""
    if not isinstance(error, OutboxError):
        raise error
    if not isinstance(error, LoginNeededError):
        words = scrub(str(error))
        wrong = {error.name: words} if isinstance(error, InputError) else {}
        return await _answer_form(request, status_of(error), wrong, words)
    if "HX-Request" in request.headers:  # a part of a page is asked for, and the whole page leads to the login
        return _answer(request, error.status, str(error), {**CHALLENGE, "HX-Refresh": "true"})
    if (way := _to_login(request)) is not None:
        return way
    has_start_token = site_of(request).access.start is not None
    await _keep_form(request)
    return _answer(request, error.status, WORDS if has_start_token else str(error), CHALLENGE)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Return what is answered to a request of a path or a method that is not there."""
    if not isinstance(error, HTTPException):
        raise error
    status = HTTPStatus(error.status_code)
    words = "there is no such page" if status is HTTPStatus.NOT_FOUND else str(error.detail)
    return _answer(request, status, words, error.headers)


async def answer_invalid(request: Request, error: Exception) -> Response:
    """Return what is answered to a request whose parameters cannot be; names each, without its value."""
    if not isinstance(error, RequestValidationError):
        raise error
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":  # nothing else was looked at
        (_, place), reason = errors[0]["loc"], errors[0]["ctx"]["error"]
        return _answer(request, HTTPStatus.BAD_REQUEST, f"the body is no JSON: {reason} at character {place}")
    found = [f"{'.'.join(map(str, each['loc'][1:])) or 'the request'}: {each['msg']}" for each in errors]
    wrong = {str(each["loc"][1]): each["msg"] for each in errors if len(each["loc"]) > 1}
    return await _answer_form(request, HTTPStatus.UNPROCESSABLE_ENTITY, wrong, "; ".join(found))


async def answer_bug(request: Request, error: Exception) -> Response:
    """Return what is answered to a request that failed by a fault of ours, which the log tells."""
    log.error("console.failed", path=request.url.path, exc_info=error)
    return _answer(request, HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the console: see its log")


def status_of(error: OutboxError) -> HTTPStatus:
    """Return the status of the answer to a request that failed so."""
    if isinstance(error, RefusedError):
        return error.status
    kinds = (STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return next(kinds, HTTPStatus.INTERNAL_SERVER_ERROR)


def problem(status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return a problem document (RFC 9457)."""
    document = {"type": "about:blank", "title": status.phrase, "status": int(status), "detail": detail}
    return JSONResponse(document, status, headers, media_type="application/problem+json")


async def _answer_form(request: Request, status: HTTPStatus, wrong: Mapping[str, str], words: str) -> Response:
    """Return the page that a form was sent from, with the form as it was sent; else an error.

    Args:
        wrong: what is wrong, by field.
        words: what is wrong, all of it.
    """
    if hasattr(request.state, "returned"):  # the page that was to show the form has failed, too
        return _answer(request, status, words)
    returned = await _keep_form(request)
    if returned is None or not returned.page or returned.page.startswith(NO_PAGES) or status not in TO_BE_MENDED:
        return _answer(request, status, words)
    returned.errors, returned.words, returned.title = wrong, "" if wrong else words, status.phrase
    return _PageAgain(request, returned, status)


async def _keep_form(request: Request) -> Returned | None:
    """Keep what a page's form has sent for the page that answers; None where no page has sent one.

    Another site's form is not shown: its words would be ours.
    """
    request.state.returned = returned = await sent_form(request) if is_from_page(request) else None
    return returned


class _PageAgain(Response):
    """The page that a form was sent from, as it is now, with the status of the error."""

    def __init__(self, request: Request, returned: Returned, status: HTTPStatus) -> None:
        super().__init__(status_code=status)
        self._request = request
        self._returned = returned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, _, query = self._returned.page.partition("?")
        request: Scope = {
            **scope,
            "method": "GET",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "state": {**scope["state"], "returned": self._returned},
        }

        async def send_with_status(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
                message = {**message, "status": self.status_code}
            await send(message)

        await self._request.app.router(request, receive, send_with_status)


def _answer(request: Request, status: HTTPStatus, words: str, headers: Mapping[str, str] | None = None) -> Response:
    if request.url.path.startswith(API):
        return problem(status, words, headers)
    response = page(request, "error.html", code=status, title=status.phrase, words=words)
    response.headers.update(headers or {})
    return response


def _to_login(request: Request) -> Response | None:
    """Return the way to the login for a browser that opens a page; None for other requests."""
    authentication = site_of(request).settings.console.authentication
    if authentication is Authentication.PROXY or request.method != "GET" or request.url.path.startswith((API, LIVE)):
        return None
    here = address_of(request)
    if request.headers.get("Sec-Fetch-Site") == "cross-site":  # the session's cookie may be there, and was not sent
        return landing(request, here)
    if authentication is Authentication.NONE:
        return None
    return RedirectResponse(f"/login?next={quote(here, safe='')}", HTTPStatus.SEE_OTHER)
