"""`relay run` as it is, with a note of each confirm in a file: `python -m bench.confirms FILE`.

The table knows when a row was marked, which is milliseconds later.
"""

import struct
import sys
import time
from pathlib import Path

from relay.cli import main
from relay.engine.publish import Publisher
from relay.engine.row import Outcome, Settled

NOTE = struct.Struct("=qd")  # outbox id, Unix time


def read_confirms(file: Path) -> dict[int, float]:
    """Give the moment of each confirm (Unix time) by outbox id."""
    notes = file.read_bytes()
    return dict(NOTE.iter_unpack(notes[: len(notes) // NOTE.size * NOTE.size]))  # the last may be half written


def _note_confirms(file: Path) -> None:
    settle, notes = Publisher.settle, file.open("wb", buffering=0)

    def noting(self: Publisher, settled: Settled) -> None:
        if settled.outcome is Outcome.CONFIRMED:
            now = time.time()
            notes.write(b"".join(NOTE.pack(row.id, now) for row in settled.rows))
        settle(self, settled)

    Publisher.settle = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    _note_confirms(Path(sys.argv[1]))
    sys.exit(main(["run"]))
