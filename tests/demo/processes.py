"""A demo as a reader runs it, and what it has left running."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.servers import ROOT


@contextmanager
def started(module: str, *arguments: str | Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module until the end of the block, on its own servers unless the variables name others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()  # its servers end with it


def processes_of(place: Path) -> list[str]:
    """List the commands of all processes that have to do with the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            about = (process / "environ").read_bytes() + command
        except OSError:
            continue  # it ended meanwhile
        if str(place).encode() in about:
            found.append(command.decode().replace("\0", " "))
    return found
