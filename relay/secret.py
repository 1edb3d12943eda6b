"""URLs that are read again at each connection, so that their passwords can be renewed."""

from collections.abc import Callable
from pathlib import Path

from pydantic import SecretStr


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
                import structlog  # noqa: PLC0415  # slow to import, and `relay healthcheck` runs all the time

                log = structlog.get_logger(__name__)
                log.warning("secret.not_renewed", source=self._name, reason=reason)
            self._told = reason
        else:
            self._secret_value, self._told = found, ""
        return self._secret_value


class SecretFile(SecretSource):
    """A URL in a file, which is read again at each connection.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read at the start.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(lambda: Path(path).read_text(encoding="utf-8").rstrip("\r\n"), f"file {path}")
