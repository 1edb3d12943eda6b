"""URLs that are read again at each connection, so that their passwords can be renewed."""

import errno
import os
import select
import stat
import time
from collections.abc import Callable
from pathlib import Path

from relay.errors import importing

with importing("publisher"):
    from pydantic import SecretStr

PIPE_TIMEOUT = 10.0  # seconds in which another process must have written it and closed it


class SecretSource(SecretStr):
    """A URL that is read again at each connection, so that its password can be renewed while the process runs.

    `DatabaseSettings(url=SecretSource(vault.database_url))` serves relay, consumer and publisher.

    Args:
        read: returns the URL. It is called on the event loop before each connection, so it must return quickly.
        name: what the log calls it.
    """

    def __init__(self, read: Callable[[], str], name: str = "the secret's source") -> None:
        self._read = read
        self._name = name
        self._accept: Callable[[str], object] = lambda _: None
        self._told = ""
        super().__init__(read())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretStr) and self.get_secret_value() == other.get_secret_value()

    def __hash__(self) -> int:
        return hash(self.get_secret_value())

    def accept_only(self, check: Callable[[str], object]) -> None:
        """Keep the last value instead of a new one for which `check` raises ValueError."""
        self._accept = check

    def get_secret_value(self) -> str:
        """Return the value as it is now.

        A value that cannot be read, or cannot be used, does not replace the last one: a file may be half written.
        """
        try:
            found = self._read()
            if found != self._secret_value:
                self._accept(found)
        # Whatever a source of the application raises, the last value may still be good.
        except Exception as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            if reason != self._told:
                from relay.logger import get_logger  # noqa: PLC0415  # slow to import, and `relay healthcheck` runs all the time

                log = get_logger(__name__)
                log.warning("secret.not_renewed", source=self._name, reason=reason)
            self._told = reason
        else:
            self._secret_value, self._told = found, ""
        return self._secret_value


class SecretFile(SecretSource):
    """A URL in a file, which is read again at each connection; a pipe, such as `<(...)` of a shell, is read once.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read at the start.
    """

    def __init__(self, path: str | Path) -> None:
        value, is_regular = read_value(path)
        super().__init__((lambda: read_value(path)[0]) if is_regular else (lambda: value), f"file {path}")


def read_again(*urls: SecretStr) -> None:
    """Read URLs that come from a file or a function: the log tells now which cannot be read or used."""
    for url in urls:
        url.get_secret_value()


def read_value(path: str | Path) -> tuple[str, bool]:
    """Return what a file holds without its last line break, and whether it can be read again, as no pipe can."""
    text, is_regular = read_file(path)
    return text.rstrip("\r\n"), is_regular


def read_file(path: str | Path) -> tuple[str, bool]:
    """Return the text of a file, and whether it can be read again, as no pipe can.

    Raises:
        OSError: also for a pipe that is empty, or that nobody has written and closed within PIPE_TIMEOUT.
        UnicodeDecodeError: it is not UTF-8.
    """
    give_up_at = time.monotonic() + PIPE_TIMEOUT
    content = bytearray()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else opening a pipe waits for a writer
    try:
        mode = os.fstat(descriptor).st_mode
        readable = select.poll()
        readable.register(descriptor, select.POLLIN)
        while readable.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
            if not (piece := os.read(descriptor, 65536)):
                break
            content += piece
        else:
            reason = f"it is a pipe that no process has written and closed within {PIPE_TIMEOUT:g} s"
            raise TimeoutError(errno.ETIMEDOUT, reason)
    finally:
        os.close(descriptor)
    if stat.S_ISFIFO(mode) and not content:
        raise OSError(errno.ENODATA, "it is a pipe that is empty, or was read before")
    return content.decode("utf-8"), stat.S_ISREG(mode)
