"""Read pending rows, lane by lane in id order, each once, and without delay.

`positions` decides what to read. This module reads it from the table, and waits for room, for a doorbell or for a time.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from relay.config.settings import RelaySettings
from relay.engine.delivery_policy import DeliveryPolicy
from relay.engine.read.pending import AHEAD, CROWDED, DUE, read_statement
from relay.engine.read.positions import LaneFloor, Plan, Positions
from relay.engine.row import Key, Row, fetch_rows, give_rows
from relay.engine.session.session import LaneSession, Retry, array_text, retried
from relay.logger import get_logger
from relay.runtime.backoff import wait_for_event
from relay.runtime.health import Health
from relay.runtime.hindrance import Hindrance

log = get_logger(__name__)

SHORT_REST = 0.002  # seconds between two reads while rows keep coming
DOORBELL_AFTER = 0.02  # seconds without a row, after which writers are asked to ring
DUE_INTERVAL = 0.5  # seconds between two looks for rows that are due, at least
STUCK_AFTER = 0.1  # seconds in which nothing is settled; then a large row that waits for room delays no other row
AHEAD_INTERVAL = 0.1  # seconds between two reads ahead; each costs a statement
CROWD = 10  # times what a read ahead brings of a lane: more are a backlog, which no second of reading ahead clears
LOOK_BACK = 10.0  # seconds: a row that becomes visible later behind higher ids comes in its turn

WENT_BACK = "the database went back from message {seen} to {found}: see docs/backup.md"

wait_of = itemgetter(Row._fields.index("backoff_ms"))


class Tail:
    """The pending rows of the session's lanes, as windows bounded in rows and bytes.

    Args:
        note_read: called at each read with the highest id that was given, and that of the rows that came.
    Attributes:
        sweep_finds: rows that only a sweep has found, as no rule foresaw them.
        backing_off: the keys that wait for a row that is tried again later.
        left_keys: the keys of rows that were left to the table since the last read was planned.
        read_at: just before the last read.
    """

    def __init__(
        self,
        session: LaneSession,
        settings: RelaySettings,
        policy: DeliveryPolicy,
        retry: Retry,
        *,
        note_read: Callable[[int, int], None] = lambda _given, _highest: None,
    ) -> None:
        self._session = session
        self._note_read = note_read
        self._lanes = session.lanes
        self._settings = settings
        self._retry = retry
        self._cursor = session.cursor()
        give_rows(self._cursor)
        self.statement = read_statement(session, settings.max_message_bytes)
        self.ahead_statement = read_statement(session, settings.max_message_bytes, AHEAD)
        self._crowded = session.sql(CROWDED)
        self._due = session.sql(DUE)
        self._positions = Positions(session.lanes, settings, time.monotonic())
        self.backing_off = BackingOff(policy)
        self._ahead = Ahead()
        self._is_ahead = False  # the last window
        self.read_at = 0.0
        self._known_until = 0.0  # the last read's snapshot named all running transactions that had an id by then
        self._row_at = 0.0
        self._due_at = 0.0  # when to look for rows that are due
        self._looked_at = 0.0  # when it last looked for them
        self._wait_over_at = inf  # when the first of the keys that wait may go; the table may not know of it
        self._room = asyncio.Event()
        self._is_interrupted = False
        self.left_keys: set[Key] = set()
        self._clock_offset = 0.0  # microseconds from the monotonic clock to the database's
        self.sweep_finds = 0

    @property
    def behind(self) -> Collection[int] | None:
        """The lanes whose rows of the last window are from a backlog; None while no lane has one."""
        return () if self._is_ahead else self._positions.behind or None

    async def windows(self, *, until: asyncio.Event) -> AsyncIterator[list[Row]]:
        """Yield pending rows by lane and id as they come, until `until` is set; an empty window after `interrupt`."""
        while not until.is_set():
            if self._is_interrupted:
                self._is_interrupted = False
                yield []
                continue
            self._session.wake.clear()
            if not self._lanes.staying:
                await self._session.leave_doorbell()
                await self._session.rest(self._settings.poll_interval, listen=True)
                continue
            if not self._positions.has_room() and not await self._is_stuck():
                continue
            if not self._positions.has_more:
                await asyncio.sleep(self.read_at + SHORT_REST - time.monotonic())
            self._is_ahead = self._ahead.is_due(time.monotonic())
            rows = await (self._rows_ahead() if self._is_ahead else self._next_rows())
            if rows:
                self._row_at = time.monotonic()
                await self._session.hold_doorbell(hold=False)
                yield rows
            else:
                await self._rest()

    def forget(self, rows: Iterable[Row]) -> None:
        """Forget rows that are settled in the table, or left to it."""
        self._positions.forget(rows)
        if self._positions.has_room():
            self._room.set()

    def read_again(self, rows: Collection[Row]) -> None:
        """Leave rows to the table, and read them again at once, in order with what the table has by then."""
        self.forget(rows)
        self.left_keys.update(row.key for row in rows if row.key is not None)
        for lane in {row.lane for row in rows}:
            self._positions.reread_from(lane)

    def hand_back(self, rows: Collection[Row]) -> None:
        """Leave rows of lanes that leave to the table; the lanes' floors end before them, for the next holder."""
        self.forget(rows)
        for lane, first in first_ids((row.lane, row.id) for row in rows).items():
            self._positions.reread_from(lane, first - 1)

    def back_off(self, row: Row, until: float, followers: Collection[Row]) -> None:
        """Leave a row to the table until that moment (monotonic), and its followers, which come back behind it."""
        self.backing_off.add(row, until, followers)
        self._due_at = min(self._due_at, until)
        self.forget((row, *followers))

    def put_back(self, rows: Collection[Row], until: float) -> None:
        """As `back_off`, for rows that cannot be put away now. The table knows nothing of this wait."""
        for row in rows:
            self.backing_off.put_back(row, until)
        self._wait_over_at = min(self._wait_over_at, until)
        self._due_at = min(self._due_at, until)
        self.forget(rows)

    def enter(self, lanes: Collection[int], floors: Mapping[int, LaneFloor]) -> None:
        """Read these lanes, which are new in `session.lanes`, from their floors, or from the start."""
        self.backing_off.forget(lanes)
        self._positions.enter(lanes, floors)
        self.wake()

    def floors(self) -> dict[int, LaneFloor]:
        """Return how far lanes are read and settled."""
        first = self.backing_off.first()
        return {
            lane: read._replace(floor=min(read.floor, first[lane] - 1)) if lane in first else read
            for lane, read in self._positions.floors(self._known_until).items()
        }

    def is_clear(self, lane: int) -> bool:
        """Whether no row of the lane is under way, and no read that has begun may bring one."""
        return self._positions.is_clear(lane)

    def reread_from(self, lane: int, before: int = 0) -> None:
        """Read a lane again from the first id above `before`; what is under way is not read twice."""
        self._positions.reread_from(lane, before)

    def interrupt(self) -> None:
        """Make `windows` yield soon, even an empty window, as the loop must do something between two windows."""
        self._is_interrupted = True
        self.wake()

    def go_on(self) -> None:
        """Withdraw an `interrupt`, as its work is done."""
        self._is_interrupted = False

    def database_time(self) -> float:
        """Return the database's time in units of `Row.created_at`: as of the last read, plus the time since then."""
        return self._clock_offset + time.monotonic() * 1e6

    def wake(self) -> None:
        """Make `windows` check its conditions again, as lanes have come or leave, or `until` is set."""
        self._room.set()
        self._session.wake.set()

    async def _is_stuck(self) -> bool:
        """Wait for room; return whether a large row waits for rows that do not settle, and other lanes can be read.

        While it waits, nothing else is read: a backlog would fill its room again and again. But what is under way may
        wait for queues that take nothing, and that must not stop every lane.
        """
        self._room.clear()
        settled = self._positions.settled
        await wait_for_event(self._room, STUCK_AFTER if self._positions.has_large else None)
        return not self._room.is_set() and self._positions.has_room_beside_large(settled)

    async def _rest(self) -> None:
        if self._positions.has_more:
            return
        idle = time.monotonic() - self._row_at
        doorbell = idle >= DOORBELL_AFTER
        if doorbell and await self._session.hold_doorbell(hold=True):
            return  # read once more first: a writer that committed until now has not rung
        # A writer may have tested the doorbell while the tail was busy, and commit only now. Polling finds its row
        # after a tenth of the time that the transaction took.
        until_due = max(0.0, self._due_at - time.monotonic())
        rest = min(max(idle / 10, SHORT_REST), self._settings.poll_interval, until_due)
        await self._session.rest(rest, listen=doorbell)

    @retried  # the floors move only when all is read
    async def _next_rows(self) -> list[Row]:
        positions = self._positions
        began = time.monotonic()
        is_sweep_due = positions.is_sweep_due(began)
        if began >= self._due_at or is_sweep_due or positions.is_sweeping:
            await self._look_for_due(began)  # otherwise rows that are merely due count as finds of the sweep
        if is_sweep_due:
            positions.begin_sweep(began)
        self.left_keys.clear()
        try:
            plan = positions.plan(self._known_until)
            known_until = self._session.written_at
            head, rows = await self._select(self.statement, plan)
            while (longer := positions.plan_again(plan, head.message_id)) is not None:
                plan = longer
                head, rows = await self._select(self.statement, plan)
        finally:
            positions.end_read()
        found = [row for row in positions.found_by_sweep(plan, rows) if not self.backing_off.keeps_back(row)]
        if found:
            self.sweep_finds += len(found)
            log.warning("rows.overtaken", rows=len(found), first_id=found[0].id)
        rows = positions.take(plan, rows, head.id, began=began, ended=time.monotonic())
        self.read_at, self._known_until = began, known_until
        self._ahead.note_read(positions.behind, head.id, time.monotonic())
        return rows

    @retried
    async def _rows_ahead(self) -> list[Row]:
        """Read what was written behind the backlogs of lanes, ahead of these backlogs."""
        positions, after, began = self._positions, self._ahead.after, time.monotonic()
        self._ahead.begin(began)
        plan = positions.plan_ahead(self._known_until, after)
        if plan is None:
            return []
        above = [after[lane] for lane in plan.lanes]
        try:
            crowded = await self._find_crowded(plan, above)
            head, rows = await self._select(self.ahead_statement, plan, above)
        finally:
            positions.end_read()
        rows = [] if positions.has_missed(plan, head.message_id) else positions.take_ahead(rows)
        self._ahead.move(crowded, head.id, time.monotonic())
        self.read_at = began
        return rows

    async def _select(self, statement: bytes, plan: Plan, after: Iterable[int] = ()) -> tuple[Row, list[Row]]:
        """Return the head of a read, and its rows.

        Args:
            after: for each lane, the id above which it is read ahead.
        """
        parameters = {
            "lanes": array_text(plan.lanes),
            "floors": array_text(plan.floors),
            "held": array_text(plan.held),
            "rows": plan.rows,
            "bytes": array_text(plan.bytes[lane] for lane in plan.lanes),
            "after": array_text(after),
        }
        async with self._session.use():
            asked_at = time.monotonic()
            await self._cursor.execute(statement, parameters, prepare=True)
            head, *rows = await fetch_rows(self._cursor)
        self._clock_offset = head.created_at - asked_at * 1e6
        # No sooner than a row is committed is its id on the disk. Ids that no row has may be given again after a crash.
        self._note_read(head.id, max((row.id for row in rows), default=0))
        due_at = min(time.monotonic() + head.backoff_ms / 1000, self._wait_over_at)
        self._due_at = max(due_at, self._looked_at + DUE_INTERVAL)
        return head, rows

    async def _find_crowded(self, plan: Plan, after: Collection[int]) -> list[int]:
        parameters = {"lanes": array_text(plan.lanes), "after": array_text(after), "most": CROWD * plan.rows}
        async with self._session.use() as connection:
            found = await (await connection.execute(self._crowded, parameters, prepare=True)).fetchall()
        return [lane for (lane,) in found]

    async def _look_for_due(self, now: float) -> None:
        self._looked_at = now
        under_way = array_text(self._positions.under_way())
        async with self._session.use() as connection:
            due = await (await connection.execute(self._due, {"held": under_way}, prepare=True)).fetchall()
        for lane, first in (*due, *self.backing_off.end(now)):
            if lane in self._lanes.held:
                self._positions.reread_from(lane, first - 1)
        self._wait_over_at = self.backing_off.over_at()


class Ahead:
    """Above which id each lane that is behind is read ahead of its backlog.

    A batch or a large transaction may leave a lane with hundreds of thousands of rows. Those that applications write
    after it need not wait for all of them: they are read ahead, each behind the earlier rows of its key.
    Nothing of this is saved, and no order rests on it: a row that is not read ahead comes in its turn.

    The id is the highest id which was given when the first backlog was found. Where many more rows come above it than a
    read brings, they are a backlog, too. Times are monotonic.

    Attributes:
        after: lane -> the id above which its rows are read ahead.
    """

    def __init__(self) -> None:
        self.after: Mapping[int, int] = {}
        self._at = 0.0  # the last read ahead, or the first read that found a backlog
        self._is_turn = False
        self._given: deque[tuple[float, int]] = deque([(-inf, 0)])  # (time, highest id that was given by then)

    def is_due(self, now: float) -> bool:
        """Whether to read ahead now. Between two such reads the backlog has one at least."""
        return bool(self.after) and self._is_turn and now >= self._at + AHEAD_INTERVAL

    def note_read(self, behind: Collection[int], position: int, now: float) -> None:
        """Note which lanes are behind after a read in order.

        Args:
            position: the highest id that was given when it was made.
        """
        if not self.after:
            self._at = now
        first = min(self.after.values(), default=position)
        self.after = {lane: self.after.get(lane, first) for lane in behind}
        self._is_turn = True

    def begin(self, now: float) -> None:
        """Note that it is read ahead now, or that there is no room to."""
        self._at, self._is_turn = now, False

    def move(self, crowded: Collection[int], position: int, now: float) -> None:
        """Move on after a read ahead.

        Args:
            crowded: lanes with a second backlog above `after`.
            position: as `note_read` takes it.
        """
        self._given.append((now, position))
        while len(self._given) > 1 and self._given[1][0] <= now - LOOK_BACK:
            self._given.popleft()
        oldest = self._given[0][1]
        self.after = {lane: position if lane in crowded else max(id_, oldest) for lane, id_ in self.after.items()}


class IdHistory:
    """The highest id of a row that a node has seen, in whichever session, or that a former relay has saved."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._seen = 0

    def note_seen(self, saved: int) -> None:
        """Note the highest id that a former relay has saved."""
        self._seen = max(self._seen, saved)

    def note_read(self, given: int, highest: int) -> None:
        """Notice a database that was set back, as by a restored backup: fewer ids were given than rows were seen."""
        if given < self._seen:
            log.error("database.went_back", seen=self._seen, found=given)
            self._health.warn("history", Hindrance(WENT_BACK.format(seen=self._seen, found=given)))
            self._seen = given
        else:
            self._seen = max(self._seen, min(highest, given))  # a writer may choose an id above


def first_ids(places: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the lowest id of each lane."""
    first: dict[int, int] = {}
    for lane, id_ in places:
        first[lane] = min(id_, first.get(lane, id_))
    return first


@dataclass(slots=True)
class Wait:
    """The wait of one key."""

    lane: int
    first: int  # the lowest id that was read of it
    until: float  # time.monotonic()


class BackingOff:
    """The keys that wait because their first row backs off; a row that holds no key waits alone.

    Neither that row nor the rows behind it stay in memory, or a few such keys would fill the window. Only the place
    from which to read again is kept. The next read finds there what the table has by then. That is the first row with
    its attempts and the rows behind it in order, or no row if an operator has removed them.
    """

    def __init__(self, policy: DeliveryPolicy) -> None:
        self._policy = policy
        # By key. By lane for the rows that were put back and hold no key: of these, only the first is known.
        self._waits: dict[Key | int | None, Wait] = {}

    def add(self, row: Row, until: float, followers: Iterable[Row] = ()) -> None:
        """Note that a row backs off, and its key if the row holds it. A late follower may have a lower id."""
        if self._policy.backoff_holds_key and row.key is not None:
            self._note(row.key, Wait(row.lane, min(each.id for each in (row, *followers)), until))

    def put_back(self, row: Row, until: float) -> None:
        """Note that a row cannot be put away before that moment, and its key if such a row holds it."""
        name = row.key if self._policy.put_away_holds_key and row.key is not None else row.lane
        self._note(name, Wait(row.lane, row.id, until))

    def _note(self, name: Key | int, wait: Wait) -> None:
        """Note a wait. If there is one already, both end with the sooner: what must wait longer is then read again."""
        other = self._waits.get(name, wait)
        self._waits[name] = Wait(wait.lane, min(wait.first, other.first), min(wait.until, other.until))

    def keeps_back(self, row: Row) -> bool:
        """Whether a row must not be sent yet, or was put back."""
        if row.backoff_ms or row.key in self._waits:
            return True
        return (wait := self._waits.get(row.lane)) is not None and wait.first <= row.id

    def keys(self) -> Collection[Key]:
        """Return the keys that wait; no row of theirs is sent for now."""
        return [key for key in self._waits if isinstance(key, tuple)]

    def over_at(self) -> float:
        """Return the moment at which the first wait is over."""
        return min((wait.until for wait in self._waits.values()), default=inf)

    def first(self) -> dict[int, int]:
        """Return the first id that waits in each lane."""
        return first_ids((wait.lane, wait.first) for wait in self._waits.values())

    def split(self, window: list[Row], read_at: float) -> tuple[list[Row], list[Row]]:
        """Split rows that were read at that moment into those to read again later and those to send now."""
        if not self._waits and not any(map(wait_of, window)):
            return [], window
        waiting: list[Row] = []
        free: list[Row] = []
        for row in window:
            if (wait := self._waits.get(row.key)) is not None:
                wait.first = min(wait.first, row.id)
                waiting.append(row)
            elif row.backoff_ms:  # it has failed in another session
                self.add(row, read_at + row.backoff_ms / 1000)
                waiting.append(row)
            else:
                free.append(row)
        return waiting, free

    def end(self, now: float) -> list[tuple[int, int]]:
        """Forget the keys whose wait is over; return the lane and the id from which to read each of them again.

        Call it when every row that was read is offered. The later rows of such a key must not come before the first.
        """
        over = {key: wait for key, wait in self._waits.items() if wait.until <= now}
        for key in over:
            del self._waits[key]
        return [(wait.lane, wait.first) for wait in over.values()]

    def forget(self, lanes: Collection[int]) -> None:
        """Forget the keys of these lanes, which another node held in between."""
        self._waits = {key: wait for key, wait in self._waits.items() if wait.lane not in lanes}
