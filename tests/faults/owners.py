"""Each lane has one relay at a time.

A row may go out from a relay that held its lane's lock at some moment after the commit. Only then can the relay have
read it. How long the frame took afterwards, in a socket or behind a fault, does not matter. The locks' holders are
known from looks into the server. So times have some slack, and what fell between two looks is not judged.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tests.faults.evidence import Evidence, NoDataError
from tests.faults.history import Ending, History, Owned, Published, Written

SLACK = 0.3  # seconds by which a writer may hear late of its commit, and a look of a lock
GAP = 0.25  # seconds between two looks at most, or a lane may have changed hands in between, and back
UNNAMED = ""  # a session that has not told its relay's name yet


class Looks:
    """Which relay held which lane at which moment."""

    def __init__(self, history: History) -> None:
        self._looks = sorted((record for record in history if isinstance(record, Owned)), key=lambda look: look.at)
        self._times = [look.at for look in self._looks]

    def holders(self, lane: int, since: float, until: float) -> set[str | None] | None:
        """Return the holders that were seen; None in it stands for no holder. None if the looks were too rare."""
        first, last = bisect_left(self._times, since), bisect_right(self._times, until)
        if any(later - earlier > GAP for earlier, later in pairwise([since, *self._times[first:last], until])):
            return None
        return {look.lanes.get(lane) for look in self._looks[first:last]}


def shared(evidence: Evidence) -> Iterator[str]:
    """Return the rows whose sender had not held their lane since they were committed."""
    looks = Looks(evidence.history)
    committed_at = {
        record.message_id: record.at
        for record in evidence.history
        if isinstance(record, Written) and record.ending is Ending.COMMITTED
    }
    judged = 0
    for sent in _published(evidence.history):
        if not sent.relay or sent.message_id not in committed_at:
            continue
        since = min(committed_at[sent.message_id], sent.at) - SLACK
        holders = looks.holders(sent.lane, since, sent.at + SLACK)
        if holders is None:
            continue
        judged += 1
        if not holders & {sent.relay, UNNAMED}:
            others = ", ".join(sorted(holder or "nobody" for holder in holders))
            yield f"row {sent.outbox_id} was sent by {sent.relay}, while lane {sent.lane} was held by {others}"
    if not judged:
        raise NoDataError("nobody looked at the locks of the lanes while several relays sent")


def belated(history: History, relay: str) -> list[Published]:
    """Return what a relay sent of lanes while every look saw another holder."""
    looks = Looks(history)
    late = []
    for sent in _published(history):
        holders = looks.holders(sent.lane, sent.at - SLACK, sent.at + SLACK)
        if sent.relay == relay and holders and not holders & {relay, UNNAMED, None}:
            late.append(sent)
    return late


def _published(history: History) -> Sequence[Published]:
    return [record for record in history if isinstance(record, Published)]
