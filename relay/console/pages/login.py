"""`/login` and `/logout`: by a password, or by the provider."""

import re
from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote, unquote

from anyio.to_thread import run_sync
from fastapi import APIRouter, Form
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from relay.config.settings import Authentication
from relay.console.access.cookie import browser_of, delete_cookie, name_of, set_cookie
from relay.console.access.identity import RefusedError
from relay.console.access.oidc import COOKIE, LOGIN_TIMEOUT, Begun
from relay.console.access.proxy import client_address
from relay.console.forms import is_local
from relay.console.site import site_of
from relay.console.templates import landing, page
from relay.logger import get_logger

MOST_WAITING = 20  # logins; a password takes some 50 ms
SEED = re.compile(r"([A-Za-z0-9_-]{43})\.(.{0,2000})")

log = get_logger(__name__)
router = APIRouter()


def local_path(path: str) -> str:
    """Return a path of this console where a user wanted to go; the first page for anything else."""
    return path if is_local(path) else "/"


@router.get("/login")
def login_page(request: Request, next: str = "/") -> Response:  # noqa: A002  (as the address has it)
    """Show the form, or the way to the provider."""
    authentication = site_of(request).access.console.authentication
    if authentication in (Authentication.NONE, Authentication.PROXY):
        return RedirectResponse("/", HTTPStatus.SEE_OTHER)
    return page(request, "login.html", by=authentication, next=local_path(next), name="", words="")


@router.post("/login")
async def log_in(
    request: Request,
    name: Annotated[str, Form(max_length=200)],
    password: Annotated[str, Form(max_length=1000)],
    next: Annotated[str, Form()] = "/",  # noqa: A002
) -> Response:
    """Begin a session for a name and a password of the file."""
    access = site_of(request).access
    console = access.console
    if console.authentication is not Authentication.PASSWORD:
        raise RefusedError(HTTPStatus.NOT_FOUND, "this console knows no passwords")
    address = client_address(request, console)
    access.limit.check(address, name)
    if access.checks.statistics().tasks_waiting >= MOST_WAITING:
        raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many log in at this moment: try again")
    # Counted before it is known: as many tries at once as one likes would else go through.
    access.limit.count(address, name)
    found = await run_sync(access.passwords.check, name, password, limiter=access.checks)
    if found is None:
        log.warning("console.login_failed", name=name, address=address)
        words = "name or password is wrong"
        return page(
            request, "login.html", code=HTTPStatus.FORBIDDEN, by=console.authentication, next=local_path(next),
            name=name, words=words,
        )  # fmt: skip
    identity, line = found
    access.limit.forgive(address, name)
    log.info("console.logged_in", name=identity.name, role=identity.role, address=address)
    response = RedirectResponse(local_path(next), HTTPStatus.SEE_OTHER)
    set_cookie(request, response, access.sessions.begin(identity, proof=line, instead_of=browser_of(request)))
    return response


@router.get("/login/provider")
async def go_to_provider(request: Request, next: str = "/") -> Response:  # noqa: A002
    """Send the browser to the provider."""
    _require_oidc(request)
    access = site_of(request).access
    begun, address = await access.provider.begin()
    response = RedirectResponse(address, HTTPStatus.SEE_OTHER)
    response.set_cookie(
        name_of(access.console, COOKIE), f"{begun.seed}.{quote(local_path(next), safe='')}", max_age=LOGIN_TIMEOUT,
        secure=True, httponly=True, samesite="lax",
    )  # fmt: skip
    return response


@router.get("/login/callback")
async def come_from_provider(request: Request) -> Response:
    """Begin a session for the user whom the provider names.

    The answer is a page: after a redirect from another site, browsers would not send the session's cookie.
    """
    _require_oidc(request)
    access = site_of(request).access
    cookie = name_of(access.console, COOKIE)
    kept = SEED.fullmatch(request.cookies.get(cookie, ""))
    if kept is None:
        raise RefusedError(HTTPStatus.FORBIDDEN, "this browser has begun no login, or too long ago: begin again")
    identity = await access.provider.finish(Begun(kept[1]), request.url.query)
    log.info("console.logged_in", name=identity.name, role=identity.role)
    response = landing(request, local_path(unquote(kept[2])))
    set_cookie(request, response, access.sessions.begin(identity, instead_of=browser_of(request)))
    response.delete_cookie(cookie, secure=True, httponly=True, samesite="lax")
    return response


@router.post("/logout")
async def log_out(request: Request) -> Response:
    """End the session."""
    site_of(request).access.sessions.end(browser_of(request))
    response = RedirectResponse("/login", HTTPStatus.SEE_OTHER)
    delete_cookie(request, response)
    return response


def _require_oidc(request: Request) -> None:
    if site_of(request).access.console.authentication is not Authentication.OIDC:
        raise RefusedError(HTTPStatus.NOT_FOUND, "this console has no provider")
