"""`relay run` as it is, with a note of each confirm in a file: `python -m bench.programs.confirms FILE`.

The table knows when a row was marked, which is milliseconds later.
"""

import sys
from pathlib import Path

from bench.frame.notes import open_notes
from relay.cli import main
from relay.engine.row import Outcome, Settled
from relay.engine.send.sender import Sender


def _note_confirms(file: Path) -> None:
    settle, note = Sender.settle, open_notes(file)

    def noting(self: Sender, settled: Settled) -> None:
        if settled.outcome is Outcome.CONFIRMED:
            note(row.id for row in settled.rows)
        settle(self, settled)

    Sender.settle = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    _note_confirms(Path(sys.argv[1]))
    sys.exit(main(["run"]))
