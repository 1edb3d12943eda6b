"""Folders of our own, gone with the process that made them, however it ends."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "outbox-relay-"
LOCK = "owner.lock"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a new folder that every user may walk through, and remove it at the end.

    A process killed by SIGKILL leaves its folder; it held a lock on it, so the next caller sees that the
    owner is gone and removes it then.
    """
    _remove_orphans()
    folder, owner = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(owner)


def _make() -> tuple[Path, int]:
    """Give a new folder, and the lock that we hold on it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        folder.chmod(0o755)  # PostgreSQL runs as another user than root and must reach its part
        owner = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        if (folder / LOCK).exists():
            return folder, owner
        os.close(owner)  # another process took it for an orphan's, before our lock


def _remove_orphans() -> None:
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            owner = os.open(folder / LOCK, os.O_RDWR)
        except FileNotFoundError:
            continue  # its owner is between mkdtemp and the lock, or has removed it meanwhile
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # in use
        else:
            shutil.rmtree(folder, ignore_errors=True)  # another process may be removing it too
        finally:
            os.close(owner)
