"""What became of each row, as those noted it who did it: the writers, the relay, the consumer."""

from collections.abc import Sequence

from bench.frame.notes import Note, NoteReader


class Ledger:
    """Reads all notes, and keeps no more than what is still under way.

    Attributes:
        written: rows that were committed.
        confirmed: commit and confirm (Unix time) of each row since the reader last took them out.
    """

    def __init__(self, commits: Sequence[NoteReader], confirms: NoteReader, taken: NoteReader) -> None:
        self._commits, self._confirms, self._taken = commits, confirms, taken
        self._unconfirmed, self._untaken = Awaited(), Awaited()
        self.written = 0
        self.confirmed: list[tuple[float, float]] = []

    def read(self) -> None:
        """Read on."""
        for commits in self._commits:
            fresh = commits.read()
            self.written += len(fresh)
            self.confirmed += self._unconfirmed.expect(fresh)
            self._untaken.expect(fresh)
        self.confirmed += self._unconfirmed.see(self._confirms.read())
        self._untaken.see(self._taken.read())

    @property
    def missing(self) -> int:
        """Rows that were committed and not confirmed, or not taken."""
        return len(self._unconfirmed.ids | self._untaken.ids)


class Awaited:
    """Rows that were committed and of which something else is still to be seen."""

    def __init__(self) -> None:
        self._committed_at: dict[int, float] = {}
        # Seen before their commit, as files are read one after the other; or a repeat, or of the warm-up.
        self._early: dict[int, float] = {}

    def expect(self, commits: list[Note]) -> list[tuple[float, float]]:
        """Give, as `see` does, what was seen before."""
        self._committed_at.update(commits)
        return self.see([(id_, self._early.pop(id_)) for id_, _ in commits if id_ in self._early])

    def see(self, notes: list[Note]) -> list[tuple[float, float]]:
        """Give the commit of each row and when it was seen, each once."""
        seen = []
        for id_, at in notes:
            if (committed_at := self._committed_at.pop(id_, None)) is None:
                self._early[id_] = at
            else:
                seen.append((committed_at, at))
        return seen

    @property
    def ids(self) -> set[int]:
        return set(self._committed_at)
