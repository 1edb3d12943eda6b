"""The sweep of the log: it finds the rows that no read foresees, as their ids were taken long before their transaction.

A lane is read to its floor, and each row up to there that its snapshot could see should have been read. The sweep looks
for those that were not: no receipt names them, and they are not under way. What an earlier sweep could see is not
looked at again. It also looks for ids that a writer has named and that the sequence has not given yet. It makes such
rows pending ones, and the tail then reads them from the table.

Nearly all rows that are new since the last sweep have high ids. It compares those with all receipts at once, in slices.
The transaction id is indexed (BRIN) for the others, and each of them looks for its receipt.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from psycopg.errors import UndefinedTable
from psycopg.sql import SQL, Identifier

from relay.engine.read.log_positions import SLICE, Checkpoint, Snapshot
from relay.engine.row import ROWS_PER_MOVE
from relay.engine.session.segments import HIGHEST, Segment
from relay.engine.session.session import LaneSession, array_text

# Old rows are many, and few of them are new to the sweep. So it needs the index of transaction ids here; this session's
# planner uses that of lane and id.
BY_TRANSACTION = SQL("SET LOCAL enable_bitmapscan = on; SET LOCAL enable_indexscan = off")

MOVE_FOUND = SQL("""
    UPDATE {schema}.message SET state = 'pending'
    WHERE {stored} AND ctid = ANY (ARRAY(
        SELECT stored.ctid
        FROM (
            SELECT lane, floor, seen_to, unseen::bigint[] AS unseen
            FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[], %(seen_to)s::bigint[], %(unseen)s::text[])
                AS given (lane, floor, seen_to, unseen)
            OFFSET 0
        ) AS owned
        CROSS JOIN LATERAL (
            SELECT ctid, id, xid, created_at
            FROM {schema}.{table}
            WHERE lane = owned.lane AND id > {low} AND id <= least(%(high)s, owned.floor)
                AND (xid >= %(swept_to)s OR xid = ANY (%(unswept)s))
                AND xid < owned.seen_to AND xid <> ALL (owned.unseen)
                AND id NOT IN (SELECT unnest(%(held)s::bigint[]))
        ) AS stored
        WHERE {unsent}
        LIMIT {rows}
    ))
    RETURNING lane, id
""")
UNSENT_AMONG_ALL = SQL("""
    stored.id NOT IN (SELECT unnest(ARRAY(
        SELECT unnest(ids) FROM {schema}.receipt WHERE block >= %(low)s >> 12 AND block <= %(high)s >> 12
    )))
""")
# A receipt from before the row was written names an earlier row of that id: the sequence was set back.
UNSENT = SQL("""
    NOT EXISTS (
        SELECT FROM {schema}.receipt
        WHERE block = stored.id >> 12 AND stored.id = ANY (ids) AND sent_at >= stored.created_at
    )
""")


EVERYTHING = Checkpoint(HIGHEST, Snapshot(HIGHEST, frozenset()))

# A row above it has an id that the sequence has not given yet.
POSITION = SQL("(SELECT last_value FROM {schema}.message_id_seq)")


class Age(Enum):
    """What a step looks for."""

    OLD = auto()  # ids that were given before the last sweep
    RECENT = auto()  # ids that were given since
    AHEAD = auto()  # ids that are not given yet


@dataclass(frozen=True, slots=True)
class Step:
    """The ids above `low` and up to `high` of one segment."""

    segment: Segment
    age: Age
    low: int
    high: int


class LogSweep:
    """One sweep after the other, each in steps."""

    def __init__(self, session: LaneSession) -> None:
        self._session = session
        self._swept: dict[int, Checkpoint] = {}  # lane -> what the last sweep could see
        self._lanes: dict[int, Checkpoint] = {}  # the lanes of this sweep, and how far they were read when it began
        self._since = Checkpoint()  # what each of them has been swept to before
        self._compared_to = 0  # up to this id each row is compared with the receipts of its block, and their times
        self._steps: deque[Step] = deque()

    @property
    def is_running(self) -> bool:
        return bool(self._steps)

    def enter(self, swept: Mapping[int, Checkpoint]) -> None:
        """Sweep these lanes, too, which were swept to there; a sweep that runs leaves them out."""
        self._swept |= swept
        self._compared_to = max([self._compared_to, *(checkpoint.base for checkpoint in swept.values())])
        for lane in swept:
            self._lanes.pop(lane, None)

    def leave_out(self, lanes: Iterable[int]) -> None:
        """Count these lanes as swept no further: other sessions may have read and swept them since."""
        for lane in lanes:
            self._lanes.pop(lane, None)
            self._swept.pop(lane, None)

    def note_leap(self, position: int) -> None:
        """Note that ids have leapt up to a position: below it, receipts may name earlier rows of the same ids."""
        self._steps.clear()
        self._compared_to = position

    def swept(self, lanes: Iterable[int]) -> dict[int, Checkpoint]:
        """Return from where another session could sweep these lanes."""
        return {lane: self._swept[lane] for lane in lanes if lane in self._swept}

    def begin(self, lanes: Mapping[int, Checkpoint]) -> None:
        """Begin a sweep of these lanes, which are read to there, unless one is running."""
        if self._steps:
            return
        self._lanes = {lane: read_to for lane, read_to in lanes.items() if lane in self._swept}
        if not self._lanes:
            return
        self._since = oldest(self._swept[lane] for lane in self._lanes)
        if self._since.seen == oldest(self._lanes.values()).seen:  # nothing can have come
            return
        base, floor = max(self._since.base, self._compared_to), max(read_to.low for read_to in self._lanes.values())
        segments = self._session.segments
        for segment in segments.between(1, base) if base else ():
            self._steps.append(Step(segment, Age.OLD, max(0, segment.first - 1), min(base, segment.past - 1)))
        for segment in segments.between(base + 1, floor) if floor > base else ():
            for low in range(max(base, segment.first - 1), min(floor, segment.past - 1), SLICE):
                high = min(low + SLICE, floor, segment.past - 1)
                self._steps.append(Step(segment, Age.RECENT, low, high))
        for segment in segments.between(floor + 1, HIGHEST):
            self._steps.append(Step(segment, Age.AHEAD, floor, HIGHEST))

    async def step(self, held: Collection[int]) -> list[tuple[int, int]]:
        """Make the next step, and return lane and id of the rows that are pending now.

        Args:
            held: the ids of the rows of the log that are under way.
        """
        async with self._session.use() as connection:
            step, lanes = self._steps[0], [lane for lane in self._session.lanes.staying if lane in self._lanes]
            if not lanes:
                self._steps.clear()
                return []
            schema = Identifier(self._session.schema)
            is_ahead = step.age is Age.AHEAD
            target = dict.fromkeys(lanes, EVERYTHING) if is_ahead else self._lanes
            since = Checkpoint() if is_ahead else self._since
            statement = self._session.sql(
                MOVE_FOUND,
                **step.segment.place(self._session.schema),
                table=Identifier(step.segment.table),
                low=POSITION.format(schema=schema) if is_ahead else SQL("%(low)s"),
                unsent=(UNSENT if step.age is Age.OLD else UNSENT_AMONG_ALL).format(schema=schema),
                rows=ROWS_PER_MOVE,
            )
            values = {
                "lanes": array_text(lanes),
                "floors": array_text(target[lane].low for lane in lanes),
                "seen_to": array_text(target[lane].seen.seen_to for lane in lanes),
                "unseen": [target[lane].seen.text for lane in lanes],
                "low": step.low,
                "high": step.high,
                "swept_to": since.seen.seen_to,
                "unswept": since.seen.text,
                "held": array_text(held),
            }
            found: list[tuple[int, int]] = []
            with suppress(UndefinedTable):  # the segment was dropped: it was empty
                async with connection.transaction():
                    if step.age is Age.OLD:
                        await connection.execute(BY_TRANSACTION)
                    found = await (await connection.execute(statement, values)).fetchall()
        if len(found) < ROWS_PER_MOVE:
            self._steps.popleft()
        if not self._steps:
            swept = oldest(self._lanes.values())
            self._swept |= dict.fromkeys(lanes, swept._replace(base=max(swept.base, self._compared_to)))
        return found


def oldest(checkpoints: Iterable[Checkpoint]) -> Checkpoint:
    """Return the checkpoint behind which nothing is that is not behind each of these."""
    given = list(checkpoints)
    seen_to = min(each.seen.seen_to for each in given)
    unseen = frozenset(xid for each in given for xid in each.seen.unseen if xid < seen_to)
    return Checkpoint(min(each.low for each in given), Snapshot(seen_to, unseen), min(each.base for each in given))
