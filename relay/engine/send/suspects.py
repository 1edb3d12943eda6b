"""Find the message that makes the broker close the channel, or the connection, without saying which it was."""

from collections.abc import Collection

from relay.engine.row import Outcome, Settled


class Suspects:
    """Rows that were in flight when it closed. They go out one at a time: who closes it again, alone, is to blame.

    True while there are some.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._ids)

    def judge(self, settled: Settled) -> Settled:
        """Give the outcome: a suspect's that was alone, and closed the channel again, is that it was refused."""
        if not self._ids and settled.outcome is not Outcome.SUSPECT:
            return settled
        ids = {row.id for row in settled.rows}
        if settled.outcome is Outcome.SUSPECT:
            if len(settled.rows) != 1 or ids.isdisjoint(self._ids):
                self._ids |= ids
                return settled
            settled = settled._replace(outcome=Outcome.REFUSED)
        self._ids -= ids
        return settled

    def forget(self, ids: Collection[int]) -> None:
        """Suspect these no more."""
        self._ids.difference_update(ids)

    def clear(self) -> None:
        """Suspect none."""
        self._ids.clear()
