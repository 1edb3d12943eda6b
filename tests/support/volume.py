"""A small file system, to be filled."""

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.folders import temporary_folder
from tests.support.postgres import UNPRIVILEGED
from tests.support.process import ServerError, run


@contextmanager
def small_volume(size: str) -> Iterator[Path]:
    """Mount one of this size (`64m`) for the servers' user.

    Raises:
        ServerError: it cannot be mounted here.
    """
    if os.geteuid() != 0:
        raise ServerError("only root can mount a small file system to fill")
    owner = pwd.getpwnam(UNPRIVILEGED).pw_uid
    with temporary_folder() as folder:
        place = folder / "volume"
        place.mkdir()
        run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0711,uid={owner}", "volume", place])
        try:
            yield place
        finally:
            run(["umount", place])


def fill(volume: Path) -> Path:
    """Leave no block free; give the file that takes them."""
    ballast = volume / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return ballast
