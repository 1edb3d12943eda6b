"""Tokens of programs: a file of lines `name:role:hash`, and the header `Authorization: Bearer` of a request.

A token is 32 random bytes, so its SHA-256 can be stored: nobody guesses what it is of.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request

from relay.console.access.identity import Identifier, Identity, LoginNeededError
from relay.console.access.line_file import refuse_common, replace_lines
from relay.errors import ConfigurationError, NotFoundError, UsageError
from relay.operate.operation import Role

LINE = re.compile(r"([\w.@-]{1,100}):(viewer|operator|owner):([0-9a-f]{64})")
SCHEME = "bearer"


class TokenFile:
    """The tokens of a file; a change of the file counts from the next request on. Without a path nobody has one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path) if path else None

    def lines(self) -> list[str]:
        """Return the lines as they are now.

        Raises:
            ConfigurationError: the file cannot be read, or a line has another form.
        """
        if self.path is None:
            return []
        try:
            refuse_common(self.path, "console.tokens")
            lines = self.path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigurationError(
                f"console.tokens = {self.path}: {reason}; `relay console token add` makes it"
            ) from error
        for number, line in enumerate(lines, start=1):
            if not LINE.fullmatch(line):
                raise ConfigurationError(
                    f"console.tokens = {self.path}: line {number} is not name:role:hash;"
                    " `relay console token add` makes one"
                )
        return lines

    def owner_of(self, token: str) -> Identity | None:
        """Return whose token it is."""
        wanted = _hash(token)
        for name, role, stored in self._split():
            if hmac.compare_digest(stored, wanted):
                return Identity(name, Role(role))
        return None

    def add(self, name: str, role: str) -> str:
        """Return a new token for this name, which takes the place of an earlier one.

        Raises:
            UsageError: the name cannot be, or the file cannot be written.
        """
        token = secrets.token_urlsafe(32)
        line = f"{name}:{role}:{_hash(token)}"
        if not LINE.fullmatch(line):
            raise UsageError("a name has 1 to 100 letters, digits and . _ @ -")
        self._write([*self._without(name), line])
        return token

    def remove(self, name: str) -> None:
        """Take a token away: it counts no longer.

        Raises:
            NotFoundError: nobody of this name has a token.
        """
        left = self._without(name)
        if len(left) == len(self.lines()):
            raise NotFoundError(f"{self.path} has no token of {name}")
        self._write(left)

    def identities(self) -> list[Identity]:
        """Return the names and roles."""
        return [Identity(name, Role(role)) for name, role, _ in self._split()]

    def _split(self) -> list[tuple[str, str, str]]:
        return [(name, role, stored) for name, role, stored in (line.split(":") for line in self.lines())]

    def _without(self, name: str) -> list[str]:
        lines = self.lines() if self.path and self.path.exists() else []
        return [line for line in lines if line.partition(":")[0] != name]

    def _write(self, lines: list[str]) -> None:
        if self.path is None:
            raise UsageError("name the file of the tokens: --file, or console.tokens (RELAY_CONSOLE_TOKENS)")
        replace_lines(self.path, lines)


def bearer_of(request: Request) -> str | None:
    """Return the token that the request sends along; no browser does so by itself."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == SCHEME else None


def with_tokens(identify: Identifier, *owners: Callable[[str], Identity | None]) -> Identifier:
    """Return an identifier that knows tokens, too: a request with a token is of its owner, or of nobody.

    Args:
        owners: each returns the owner of a token that it knows.

    Raises:
        LoginNeededError: nobody has this token.
    """

    async def identified(request: Request, /) -> Identity | None:
        token = bearer_of(request)
        if token is None:
            return await identify(request)
        for owner_of in owners:
            if (owner := owner_of(token)) is not None:
                return owner
        raise LoginNeededError

    return identified


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
