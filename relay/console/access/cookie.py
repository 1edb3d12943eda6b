"""The one cookie of the console: a random text.

It has the prefix `__Host-`, so that no other host and no unencrypted page can set it. That forbids a path, so consoles
below the paths of one host have cookies of different names. SameSite=Strict: a browser does not send it with a request
that another site caused.
"""

import re
import secrets

from starlette.requests import Request
from starlette.responses import Response

from relay.config.settings import ConsoleSettings
from relay.console.access.identity import door_of

NAME = "__Host-relay"
VALUE = re.compile(r"[A-Za-z0-9_-]{43}")  # of 32 random bytes


def name_of(console: ConsoleSettings, name: str = NAME) -> str:
    """Return what a cookie is called in this console: `__Host-relay.ops.billing` below `/ops/billing`."""
    return name + console.base.replace("/", ".")


def browser_of(request: Request) -> str | None:
    """Return the cookie's text, if the browser has sent one of ours."""
    value = request.cookies.get(name_of(door_of(request).console), "")
    return value if VALUE.fullmatch(value) else None


def new_browser() -> str:
    """Return a new text for a cookie."""
    return secrets.token_urlsafe(32)


def set_cookie(request: Request, response: Response, browser: str) -> None:
    """Set the browser's cookie, until the browser is closed."""
    name = name_of(door_of(request).console)
    response.set_cookie(name, browser, path="/", secure=True, httponly=True, samesite="strict")


def delete_cookie(request: Request, response: Response) -> None:
    """Let the browser forget its cookie."""
    name = name_of(door_of(request).console)
    response.delete_cookie(name, path="/", secure=True, httponly=True, samesite="strict")
