"""Which console `--server` names, and the token for it."""

import os
import re
from pathlib import Path

import httpx

from relay.config.loading import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from relay.errors import UsageError
from relay.runtime.listen import is_loopback

TOKEN = re.compile(r"[!-~]+")


def check_server(server: str) -> None:
    """See that a URL may be that of a console, and that a token goes to it encrypted, or stays on this host.

    Raises:
        UsageError: it may not be.
    """
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError("--server takes the URL of a console, https://relay.example.org")
    if url.scheme == "http" and not is_loopback(url.host):
        raise UsageError("--server: over http:// others can read the token; use https://, or a console on this host")


def read_token() -> str:
    """Return the token for the console.

    Raises:
        UsageError: there is no token, or it has a character that cannot be in one.
    """
    token = _find_token()
    if not TOKEN.fullmatch(token):
        raise UsageError(
            f"the token in {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} has a character that cannot be in a token"
        )
    return token


def _find_token() -> str:
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        return token
    if file := os.environ.get(TOKEN_FILE_VARIABLE):
        try:
            return Path(file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{TOKEN_FILE_VARIABLE} = {file} cannot be read: {error}") from error
    raise UsageError(
        f"--server needs a token, in {TOKEN_VARIABLE} or a file that {TOKEN_FILE_VARIABLE} names:"
        " `relay console token add` makes one"
    )
