"""A small file system that a test can fill."""

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.postgres import UNPRIVILEGED
from relay.testing.servers.process import ServerError, run


@contextmanager
def small_volume(size: str) -> Iterator[Path]:
    """Yield a file system of this size (`64m`), mounted for the servers' user.

    Raises:
        ServerError: this machine cannot mount it.
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
    """Fill the file system, and return the file that takes the space."""
    ballast = volume / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return ballast
