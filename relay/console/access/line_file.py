"""A file of lines that only its owner may write."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from relay.errors import ConfigurationError, UsageError


def refuse_common(path: Path, setting: str) -> None:
    """Refuse a file that every user of the host may write, and so add a login to.

    Raises:
        ConfigurationError: it is one.
        OSError: it cannot be looked at.
    """
    if path.stat().st_mode & stat.S_IWOTH:
        raise ConfigurationError(f"{setting} = {path}: every user of this host may write it; `chmod o-w {path}`")


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the file as a whole: a console never reads half of it.

    Raises:
        UsageError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
