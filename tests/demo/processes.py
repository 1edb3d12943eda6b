"""What a demo has left running."""

from pathlib import Path


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
