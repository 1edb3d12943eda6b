"""The password file: one line a user, `name:role:hash`."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from relay.console.access.identity import Identity
from relay.console.access.line_file import refuse_common, replace_lines
from relay.errors import ConfigurationError, NotFoundError, UsageError
from relay.operate.operation import Role

NAME = re.compile(r"[\w.@-]{1,100}")
SHORTEST = 12  # characters
MOST_CHECKS = 2  # at once: each takes 64 MiB, and a core for some 50 ms

_hasher = PasswordHasher()
_unknown = _hasher.hash(os.urandom(16).hex())


class PasswordFile:
    """The users of a password file; a change of the file counts from the next request on."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._read_at: tuple[int, int, int] | None = None
        self._lines: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Return the lines as they are now.

        Raises:
            ConfigurationError: the file cannot be read, or a line has no user.
        """
        try:
            refuse_common(self.path, "console.users")
            seen = self.path.stat()
            stamp = (seen.st_mtime_ns, seen.st_size, seen.st_ino)
            if stamp != self._read_at:
                self._lines = tuple(_checked(self.path, self.path.read_text("utf-8").splitlines()))
                self._read_at = stamp
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigurationError(
                f"console.users = {self.path}: {reason}; `relay console user add` makes it"
            ) from error
        return self._lines

    def holds(self, line: str) -> bool:
        """Whether the user is still there, with the same role and password."""
        return line in self.lines()

    def check(self, name: str, password: str) -> tuple[Identity, str] | None:
        """Return the user and the line, if name and password are right; blocks for a moment in any case."""
        line = next((line for line in self.lines() if line.partition(":")[0] == name), None)
        _, role, stored = line.split(":", 2) if line else ("", Role.VIEWER, _unknown)
        try:
            _hasher.verify(stored, password)
        except (VerificationError, InvalidHashError):
            return None
        return (Identity(name, Role(role)), line) if line else None

    def put(self, name: str, role: str, password: str) -> None:
        """Add a user, or give one another role and password.

        Raises:
            UsageError: the name or the password cannot be.
        """
        if not NAME.fullmatch(name):
            raise UsageError("a name has 1 to 100 letters, digits and . _ @ -")
        if len(password) < SHORTEST:
            raise UsageError(f"the password is shorter than {SHORTEST} characters: choose a longer one")
        replace_lines(self.path, [*self._without(name), f"{name}:{Role(role)}:{_hasher.hash(password)}"])

    def remove(self, name: str) -> None:
        """Take a user away; sessions of theirs end.

        Raises:
            NotFoundError: there is no such user.
        """
        left = self._without(name)
        if len(left) == len(self.lines()):
            raise NotFoundError(f"{self.path} has no user {name}")
        replace_lines(self.path, left)

    def users(self) -> list[Identity]:
        """Return the names and roles."""
        split = (line.split(":") for line in self.lines())
        return [Identity(name, Role(role)) for name, role, _ in split]

    def _without(self, name: str) -> list[str]:
        lines = self.lines() if self.path.exists() else ()
        return [line for line in lines if line.partition(":")[0] != name]


def _checked(path: Path, lines: Iterable[str]) -> Iterable[str]:
    for number, line in enumerate(lines, start=1):
        name, *others = line.split(":")
        is_user = (
            len(others) == 2 and NAME.fullmatch(name) and others[0] in set(Role) and others[1].startswith("$argon2")
        )
        if not is_user:
            raise ConfigurationError(
                f"console.users = {path}: line {number} is not name:role:hash; `relay console user add` makes one"
            )
        yield line
