"""Errors as answers: a page for a browser, a problem document for the API."""

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from relay.console.access.identity import RefusedError
from relay.console.templates import page
from relay.errors import (
    AccessError,
    BusyError,
    DeadlineError,
    NotFoundError,
    OutboxError,
    SchemaError,
    UnavailableError,
    UsageError,
)
from relay.scrub import scrub

API = "/api/"
STATUSES: dict[type[OutboxError], HTTPStatus] = {
    NotFoundError: HTTPStatus.NOT_FOUND,
    UsageError: HTTPStatus.UNPROCESSABLE_ENTITY,
    BusyError: HTTPStatus.CONFLICT,
    DeadlineError: HTTPStatus.GATEWAY_TIMEOUT,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    SchemaError: HTTPStatus.SERVICE_UNAVAILABLE,
    AccessError: HTTPStatus.SERVICE_UNAVAILABLE,
}


async def answer_error(request: Request, error: Exception) -> Response:
    """Return what is answered to a request that failed with an error of ours."""
    if not isinstance(error, OutboxError):
        raise error
    status = status_of(error)
    words = scrub(str(error))
    if request.url.path.startswith(API):
        return problem(status, words)
    return page(request, "error.html", code=status, title=status.phrase, words=words)


def status_of(error: OutboxError) -> HTTPStatus:
    """Return the status of the answer to a request that failed so."""
    if isinstance(error, RefusedError):
        return error.status
    kinds = (STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return next(kinds, HTTPStatus.INTERNAL_SERVER_ERROR)


def problem(status: HTTPStatus, detail: str) -> JSONResponse:
    """Return a problem document (RFC 9457)."""
    document = {"type": "about:blank", "title": status.phrase, "status": int(status), "detail": detail}
    return JSONResponse(document, status, media_type="application/problem+json")
