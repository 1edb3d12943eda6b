"""Join the rows of the table with the messages of the inboxes, both in the order of message_id.

What has no partner is only a candidate: a message may have been applied long before or after the time that was read.
And a row may be of any day. So candidates are looked up, some at a time, before they count. In memory are these, and
the first ones that are named.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import date, datetime
from itertools import groupby
from operator import attrgetter
from uuid import UUID

from relay.operate.reconcile.inbox import AppliedMessage, Handled
from relay.operate.reconcile.report import ConsumerReport, Count, Duplicate, Lost, Missing
from relay.operate.reconcile.table import TableRow

ROWS_PER_LOOK = 1000  # in the inbox, by its primary key
ENTRIES_PER_LOOK = 50_000  # in the table, which is read from end to end each time
IDS_KEPT = 50  # of missing messages: more are no command line

LookUpApplied = Callable[[Sequence[tuple[str, str]]], set[tuple[str, str]]]
LookUpDead = Callable[[str], Set[str]]  # of a queue: the message ids of its dead letters
LookUpLost = Callable[[Sequence[AppliedMessage]], list[AppliedMessage]]


class Comparison:
    """The figures, while rows and entries come in.

    Attributes:
        counts: meant rows by day and state.
        missing_types: the event types of what some consumer has not.
        missing_ids: the first of those that some consumer has not; one more than `IDS_KEPT` stands for more.
        first_sent, last_sent: the times between which all of these were sent.
        duplicates: message ids of several rows; and the first of them.
    """

    def __init__(
        self,
        consumers: Mapping[str, Handled],
        lost_between: tuple[datetime, datetime],
        *,
        limit: int,
        look_up_applied: LookUpApplied,
        look_up_dead: LookUpDead,
        look_up_lost: LookUpLost,
    ) -> None:
        self._tallies = {
            name: ConsumerReport(name, event_types=handled.event_types, queues=handled.queues)
            for name, handled in consumers.items()
        }
        self._by_type: dict[str, list[ConsumerReport]] = {}
        self._lost_from, self._lost_until = lost_between
        self._limit = limit
        self._look_up_applied = look_up_applied
        self._look_up_dead = look_up_dead
        self._look_up_lost = look_up_lost
        self._unapplied: list[tuple[str, TableRow]] = []
        self._without_row: list[AppliedMessage] = []
        self.counts: Counter[tuple[date, str]] = Counter()
        self.missing_types: set[str] = set()
        self.missing_ids: dict[str, None] = {}
        self.first_sent: datetime | None = None
        self.last_sent: datetime | None = None
        self.duplicates = 0
        self.duplicates_first: list[Duplicate] = []

    def run(self, rows: Iterable[TableRow], entries: Iterable[AppliedMessage]) -> None:
        """Compare them all; both come in the order of message_id."""
        for found, applied in joined(rows, entries):
            if found:
                self._see_rows(found, applied)
            else:
                self._without_row += [e for e in applied if self._lost_from <= e.processed_at < self._lost_until]
            if len(self._unapplied) >= ROWS_PER_LOOK:
                self._settle_unapplied()
            if len(self._without_row) >= ENTRIES_PER_LOOK:
                self._settle_without_row()
        self._settle_unapplied()
        self._settle_without_row()

    def consumers(self) -> list[ConsumerReport]:
        """Return what was found of each consumer, by name."""
        for tally in self._tallies.values():
            tally.applied = tally.expected - tally.missing - tally.dead
        return sorted(self._tallies.values(), key=attrgetter("consumer"))

    def rows(self) -> list[Count]:
        """Return the meant rows by day and state."""
        return [Count(day, state, rows) for (day, state), rows in sorted(self.counts.items())]

    def _see_rows(self, rows: Sequence[TableRow], entries: Sequence[AppliedMessage]) -> None:
        expected: dict[str, TableRow] = {}  # by the role that wrote it
        for row in rows:
            if row.is_meant:
                self.counts[row.day, row.state] += 1
            if row.is_expected:
                expected[row.written_as] = row
        if len(rows) > 1 and any(row.is_meant for row in rows):
            self.duplicates += 1
            if self.duplicates <= self._limit:
                self.duplicates_first.append(Duplicate(UUID(rows[0].message_id), len(rows)))
        applied_by = {entry.consumer for entry in entries}  # one may have it twice, under two days
        for row in expected.values():
            for tally in self._handling(row.event_type):
                tally.expected += 1
                if tally.consumer not in applied_by:
                    self._unapplied.append((tally.consumer, row))

    def _handling(self, event_type: str) -> list[ConsumerReport]:
        if event_type not in self._by_type:
            self._by_type[event_type] = [
                each for each in self._tallies.values() if each.event_types is None or event_type in each.event_types
            ]
        return self._by_type[event_type]

    def _settle_unapplied(self) -> None:
        """Count those that are still not there: they may have been applied at another time, or just now."""
        candidates, self._unapplied = self._unapplied, []
        if not candidates:
            return
        asked = [(name, inbox_id) for name, row in candidates for inbox_id in row.inbox_ids]
        applied = self._look_up_applied(asked)
        for name, row in candidates:
            if not any((name, inbox_id) in applied for inbox_id in row.inbox_ids):
                self._note_missing(self._tallies[name], row)

    def _note_missing(self, tally: ConsumerReport, row: TableRow) -> None:
        assert row.sent_at is not None, "only sent rows are expected"  # noqa: S101
        if any(row.message_id in self._look_up_dead(queue) for queue in tally.queues):
            tally.dead += 1
            return
        tally.missing += 1
        self.missing_types.add(row.event_type)
        if tally.missing <= self._limit:
            tally.missing_first.append(Missing(UUID(row.message_id), row.id, row.sent_at))
        if len(self.missing_ids) <= IDS_KEPT:
            self.missing_ids[row.message_id] = None
        self.first_sent = min(self.first_sent or row.sent_at, row.sent_at)
        self.last_sent = max(self.last_sent or row.sent_at, row.sent_at)

    def _settle_without_row(self) -> None:
        """Count those of which no row is kept: it may be of another day, and sent again by a replay."""
        candidates, self._without_row = self._without_row, []
        if not candidates:
            return
        for entry in self._look_up_lost(candidates):
            tally = self._tallies[entry.consumer]
            tally.lost += 1
            tally.lost_from = min(tally.lost_from or entry.processed_at, entry.processed_at)
            tally.lost_until = max(tally.lost_until or entry.processed_at, entry.processed_at)
            if tally.lost <= self._limit:
                tally.lost_first.append(Lost(UUID(entry.message_id), entry.processed_at))


def joined(
    rows: Iterable[TableRow], entries: Iterable[AppliedMessage]
) -> Iterator[tuple[Sequence[TableRow], Sequence[AppliedMessage]]]:
    """Yield the rows and the entries of each message id that either has; both come in its order."""
    left = groupby(rows, key=attrgetter("message_id"))
    right = groupby(entries, key=attrgetter("message_id"))
    row, entry = next(left, None), next(right, None)
    while row is not None or entry is not None:
        if entry is None or (row is not None and row[0] < entry[0]):
            assert row is not None, "one of the two is left"  # noqa: S101
            yield list(row[1]), ()
            row = next(left, None)
        elif row is None or entry[0] < row[0]:
            yield (), list(entry[1])
            entry = next(right, None)
        else:
            yield list(row[1]), list(entry[1])
            row, entry = next(left, None), next(right, None)
