"""The one cookie of the console: a random text.

It has the prefix `__Host-`, so that no other host and no unencrypted page can set it. SameSite=Strict: a browser does
not send it with a request that another site caused.
"""

import re
import secrets

from starlette.requests import Request
from starlette.responses import Response

NAME = "__Host-relay"
VALUE = re.compile(r"[A-Za-z0-9_-]{43}")  # of 32 random bytes


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
