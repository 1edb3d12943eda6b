"""Notes about rows in a file, made as things happen: which row, and when. Another process reads them meanwhile."""

import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

NOTE = struct.Struct("=qd")  # outbox id, Unix time

Note = tuple[int, float]


def open_notes(file: Path) -> Callable[[Iterable[int]], None]:
    """Empty the file, and return a function that notes that something happens to these rows now."""
    notes = file.open("wb", buffering=0)

    def note(ids: Iterable[int]) -> None:
        now = time.time()
        notes.write(b"".join(NOTE.pack(id_, now) for id_ in ids))

    return note


class NoteReader:
    """Reads a file of notes that grows, each of them once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._place = 0

    def read(self) -> list[Note]:
        """Return what was noted since the last call; nothing while there is no file."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as notes:
            notes.seek(self._place)
            fresh = notes.read()
        fresh = fresh[: len(fresh) // NOTE.size * NOTE.size]  # the last may be half written
        self._place += len(fresh)
        return list(NOTE.iter_unpack(fresh))
