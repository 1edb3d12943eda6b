"""Where the rows lie: the table of pending rows, or a segment of the log, which is a range of ids.

A row of the log is settled by a receipt that names its id. A row that backs off, is parked or waits in quarantine moves
out of the log, to the partition of its new state. It never comes back.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from psycopg.sql import SQL, Composable, Identifier, Literal

from relay.engine.row import Row

# An emptied segment may get a row of an old id, so it counts. A dropped one is not there.
SEGMENTS = SQL("SELECT number, first, past FROM {schema}.segment ORDER BY first")

# Until the end of the transaction, no segment comes.
KEEP_SEGMENTS = SQL("LOCK TABLE ONLY {schema}.message_log IN ACCESS SHARE MODE")

HIGHEST = (1 << 63) - 1  # of bigint
BLOCK_BITS = 12  # a receipt names ids of one block, which has 4,096


class Segment(NamedTuple):
    """A table of the log, and the ids that it takes."""

    table: str
    first: int
    past: int  # the lowest id that it does not take any more

    def place(self, schema: str) -> dict[str, Composable]:
        """Return `given` and `stored`, by which a statement finds the rows of this table that it changes.

        `stored` prunes the plan to this table. An update that names the table itself could not move a row out of it.
        """
        first, past = Literal(str(self.first)), Literal(str(self.past))  # as text: -2^63 would become numeric
        stored = SQL("state = 'written' AND id >= {} AND id < {}").format(first, past)
        return {"given": given(schema, self.table), "stored": stored}


# Pending rows by lane and id (`places`), for statements that change them. The planner can only run a LATERAL with LIMIT
# row by row through the index. It may run a plain join as a scan of the backlog for each row. Statistics that were
# taken while a large transaction was still open say that the table is empty.
GIVEN = SQL("""
    unnest(%(lanes)s::smallint[], %(ids)s::bigint[]) AS wanted (lane, id)
    CROSS JOIN LATERAL (
        SELECT ctid AS place, id, aggregate_type, aggregate_id
        FROM {schema}.{table}
        WHERE lane = wanted.lane AND id = wanted.id
        LIMIT 1
    ) AS given
""")


def given(schema: str, table: str) -> Composable:
    """Return `GIVEN` for one table."""
    return GIVEN.format(schema=Identifier(schema), table=Identifier(table))


def in_pending(schema: str) -> dict[str, Composable]:
    """Return `given` and `stored` (see `Segment.place`) for the table of pending rows."""
    return {"given": given(schema, "message_pending"), "stored": SQL("state = 'pending'")}


class Segments:
    """The segments that a session knows; none while the log is not used.

    Attributes:
        are_used: whether there are any.
        past: where they end, as `READ` tells it with each read. Ids from there on lie in `message_log_far`.
        moved: ids of rows under way that have moved out of the log since they were read.
    """

    def __init__(self) -> None:
        self._known: list[Segment] = []
        self._ends: Sequence[int] = ()
        self.are_used = False  # an attribute, so that the file is closed for a reader who follows a pending row
        self.past = 0
        self.moved: set[int] = set()

    def learn(self, listed: Iterable[tuple[int, int, int]]) -> bool:
        """Take over number, first id and end of each segment, in order of ids; return whether they have changed.

        Segment 0 is always there. Others are made before the log is used.
        """
        before = self._known
        known = [Segment(f"message_log_{number}", first, past) for number, first, past in listed]
        self.past = known[-1].past if known else 0
        if len(known) < 2:
            known = []
        else:
            known.append(Segment("message_log_far", self.past, HIGHEST))
        self._known, self._ends = known, [segment.past for segment in known]
        self.are_used = bool(known)
        return known != before

    def between(self, low: int, high: int) -> Sequence[Segment]:
        """Return the segments from that of the first id to that of the second one."""
        return self._known[self._index(low) : self._index(high) + 1]

    def has(self, row: Row) -> bool:
        """Whether a row lies in the log now."""
        return row.is_logged and row.id not in self.moved

    def has_in_far(self, rows: Iterable[Row]) -> bool:
        """Whether some row lies behind the known segments: that table may have become a segment since."""
        return self.are_used and any(row.id >= self.past and self.has(row) for row in rows)

    def places(self, rows: Iterable[Row], schema: str) -> Iterator[tuple[dict[str, Composable], list[Row]]]:
        """Split rows by the table in which they lie; yield the words that find it, and its rows."""
        for is_logged, stored in groupby(sorted(rows, key=self.has), self.has):
            if not is_logged:
                yield in_pending(schema), list(stored)
                continue
            for index, of_segment in groupby(sorted(stored, key=attrgetter("id")), lambda row: self._index(row.id)):
                yield self._known[index].place(schema), list(of_segment)

    def _index(self, id_: int) -> int:
        return min(bisect_right(self._ends, id_), len(self._known) - 1)
