"""Folders of our own, gone with the process that made them, however it ends."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "outbox-relay-"
LOCK = "owner.lock"
MEMORY = Path("/dev/shm")  # noqa: S108 - each folder in it has a name by chance
ENOUGH = 4 << 30  # bytes, of which a test run's servers fill less than half


@contextmanager
def temporary_folder(*, in_memory: bool = False) -> Iterator[Path]:
    """Make a new folder that every user may walk through, and remove it at the end.

    `in_memory`: a folder that is no disk's, where the machine has enough memory for it.
    A process killed by SIGKILL leaves its folder. It held a lock on the folder, so the next caller sees that the
    owner is gone and removes it.
    """
    place = MEMORY if in_memory and _has_room(MEMORY) else Path(tempfile.gettempdir())
    _remove_orphans(place)
    folder, owner = _make(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(owner)


def _has_room(place: Path) -> bool:
    try:
        found = os.statvfs(place)
    except FileNotFoundError:
        return False
    return found.f_bavail * found.f_frsize >= ENOUGH


def _make(place: Path) -> tuple[Path, int]:
    """Return a new folder, and the lock that we hold on it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        folder.chmod(0o755)  # PostgreSQL runs as another user than root and must reach its part
        owner = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        if (folder / LOCK).exists():
            return folder, owner
        os.close(owner)  # another process took it for an orphan's, before our lock


def _remove_orphans(place: Path) -> None:
    for folder in place.glob(PREFIX + "*"):
        try:
            found = folder.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                continue
            owner = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # its owner is between mkdtemp and the lock, or has removed it meanwhile; or it is not ours
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # in use
        else:
            shutil.rmtree(folder, ignore_errors=True)  # another process may be removing it too
        finally:
            os.close(owner)
