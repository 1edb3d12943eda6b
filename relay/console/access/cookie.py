"""The one cookie of the console: a random text, and the form token that follows from it.

It has the prefix `__Host-`, so that no other host and no unencrypted page can set it. SameSite=Strict: a browser does
not send it with a request that another site caused.
"""

import hashlib
import hmac
import re
import secrets

from starlette.requests import Request
from starlette.responses import Response

NAME = "__Host-relay"
VALUE = re.compile(r"[A-Za-z0-9_-]{43}")  # of 32 random bytes

_KEY = secrets.token_bytes(32)  # a page that is older than the process is loaded again


def browser_of(request: Request) -> str | None:
    """Return the cookie's text, if the browser has sent one of ours."""
    value = request.cookies.get(NAME, "")
    return value if VALUE.fullmatch(value) else None


def new_browser() -> str:
    """Return a new text for a cookie."""
    return secrets.token_urlsafe(32)


def set_cookie(response: Response, browser: str) -> None:
    """Set the browser's cookie, until the browser is closed."""
    response.set_cookie(NAME, browser, path="/", secure=True, httponly=True, samesite="strict")


def delete_cookie(response: Response) -> None:
    """Let the browser forget its cookie."""
    response.delete_cookie(NAME, path="/", secure=True, httponly=True, samesite="strict")


def form_token(browser: str) -> str:
    """Return what a form must send along with this cookie: no other site can read or guess it."""
    return hmac.new(_KEY, browser.encode(), hashlib.sha256).hexdigest()


def is_form_token(browser: str, token: str) -> bool:
    """Whether this token belongs to this cookie."""
    return hmac.compare_digest(form_token(browser), token.encode("ascii", "replace").decode())
