"""Read pending rows, lane by lane in id order, each once, and none of them too late.

Ids are given before commit, so a row may become visible behind a higher id. The tail remembers for each lane how far
it has read (its floor), and goes back when a transaction that was running during an earlier read has ended: to the
position at which that transaction was first seen. All decisions about what was missed go by the snapshot of the read
itself. What no rule foresees (an id taken long before its row was inserted) is caught by the sweep, which reads from
zero: the row's state, not its position, is the truth.

A read from far back walks over every dead row that cannot be vacuumed yet, and there may be tens of millions: so only
one lane at a time is read in that way.
"""

import asyncio
import time
from collections.abc import Collection, Iterable
from itertools import chain, groupby
from operator import itemgetter

from relay.backoff import wait_for_event
from relay.config.settings import KeyPolicy, Ordering, RelaySettings
from relay.engine.read.backoff_keys import BackingOff
from relay.engine.read.open_transactions import OpenTransactions
from relay.engine.read.pending import DUE, read_statement
from relay.engine.read.window import Window
from relay.engine.row import Key, Row, fetch_rows, give_rows
from relay.engine.session.database_retry import DatabaseRetry
from relay.engine.session.session import LaneSession, array_text

SHORT_REST = 0.002  # seconds between two reads while rows keep coming
DOORBELL_AFTER = 0.02  # seconds without a row, after which writers are asked to ring
DUE_INTERVAL = 0.5  # seconds between two looks for rows that are due, at least
SWEEP_SHARE = 50  # a sweep takes at most this part of the time
STUCK_AFTER = 0.1  # seconds in which nothing is settled: a large row that waits for room holds up no others then
FAR = 100_000  # ids; a read that starts so far behind the last one may have to pass many dead rows


class Tail:
    """The pending rows of the session's lanes, as windows bounded in rows and bytes.

    Attributes:
        leaving: of the session's lanes, those that are read no more.
        behind: lanes of which the last window has not all that there was, or only the rest of a backlog.
        sweep_finds: rows that no rule foresaw, and that only a sweep has found.
    """

    def __init__(self, session: LaneSession, settings: RelaySettings, retry: DatabaseRetry) -> None:
        self._session = session
        self._settings = settings
        self._retry = retry
        self._cursor = session.cursor()
        give_rows(self._cursor)
        self.statement = read_statement(session, settings.max_message_bytes)
        self._due = session.sql(DUE)
        self._window = Window(settings)
        self._floors: dict[int, int] = {}  # lane -> everything visible at or below was read
        self._far: dict[int, None] = {}  # lanes that are to be read from far back, in the order of their turn
        self._large: dict[int, int] = {}  # lane -> cost of its next row, which did not fit, in the order of their turn
        self._gone_back: dict[int, int] = {}  # lane -> how far, since the last read began
        self._unswept: list[int] = []  # lanes whose turn in the sweep is to come
        self._sweeping: int | None = None  # the one that the last read has swept
        self._sweep_took = 0.0  # seconds, so far
        self._open = OpenTransactions()
        holding = settings.ordering is Ordering.KEY and settings.key_policy is KeyPolicy.HOLD
        self._backing_off = BackingOff(holding=holding)
        self._read_at = 0.0  # just before the last read
        self._known_until = 0.0  # who had a transaction id by then was named by the last read's snapshot, if running
        self._row_at = 0.0
        self._due_at = 0.0  # when to look for rows that are due
        self._looked_at = 0.0  # for them
        self._sweep_at = time.monotonic() + settings.sweep_interval
        self._more = True  # some lane has more than it was asked for
        self._reading: list[int] = []  # the lanes of the last read
        self._limit = 1  # rows of the last read, a lane
        self._limit_bytes: dict[int, int] = {}  # the same in bytes, by lane
        self._lagging: set[int] = set()  # lanes whose last read has not brought all
        self._room = asyncio.Event()
        self._give_way = False
        self._clock_offset = 0.0  # microseconds from our monotonic clock to the database's
        self.leaving: set[int] = set()
        self.behind: set[int] = set()
        self.sweep_finds = 0

    async def next_window(self, *, until: asyncio.Event) -> list[Row] | None:
        """Wait for pending rows and give them, by lane and id; none after `interrupt`; None when `until` is set."""
        while not until.is_set():
            if self._give_way:
                self._give_way = False
                return []
            self._session.wake.clear()
            if self.leaving.issuperset(self._session.lanes):
                await self._session.leave_doorbell()
                await self._session.rest(self._settings.poll_interval, listen=True)
                continue
            if not self._has_room() and not await self._is_stuck():
                continue
            if not self._more:
                await asyncio.sleep(self._read_at + SHORT_REST - time.monotonic())
            rows = await self._retry.run(self._next_rows)  # whose floors move only when all is read
            if rows:
                self._row_at = time.monotonic()
                await self._session.hold_doorbell(hold=False)
                return rows
            await self._rest()
        return None

    def forget(self, rows: Iterable[Row]) -> None:
        """These rows are settled in the table."""
        self._more |= self._window.forget(rows)  # a lane that was left out until now
        if self._has_room():
            self._room.set()

    def back_off(self, row: Row, until: float, followers: Collection[Row]) -> None:
        """This row is not to be sent before that moment (time.monotonic), which the table knows; these wait for it."""
        self._backing_off.add(row, until, followers)
        self._due_at = min(self._due_at, until)
        self.forget((row, *followers))

    def hold_rows(self, window: list[Row]) -> list[Row]:
        """Give the rows that may be sent now. Offer them at once: in between another may begin to wait."""
        free, held = self._backing_off.hold_rows(window, self._read_at)
        if held:
            self.forget(held)
        return free

    def keys_backing_off(self) -> Collection[Key]:
        """Give the keys of which nothing is sent for now: their first row backs off."""
        return self._backing_off.keys()

    def enter(self, lanes: Collection[int]) -> None:
        """These lanes are new in `session.lanes`: read them from the start."""
        self._backing_off.forget(lanes)
        for lane in lanes:
            self._floors[lane], self._far[lane] = 0, None
        self._more = True
        self.wake()

    def leave(self, lanes: Iterable[int]) -> None:
        """Read these lanes no more, until they are gone."""
        self.leaving.update(lanes)
        self.wake()

    def is_clear(self, lane: int) -> bool:
        """Tell whether no row of the lane is under way. Ask while no read can be: `session.use`."""
        return not self._window.ids(lane)

    def reread_from(self, lane: int, before: int = 0) -> None:
        """Read a lane again from the first id above `before`; what is held is not read twice."""
        floor = self._floors.get(lane, 0)
        if floor > before:
            self._floors[lane] = before
        if floor > before + FAR:
            self._far[lane] = None
        self._gone_back[lane] = min(self._gone_back.get(lane, before), before)
        self._more = True

    def interrupt(self) -> None:
        """Let `next_window` return soon, also without rows: something is to be done between two windows."""
        self._give_way = True
        self.wake()

    def go_on(self) -> None:
        """That is done: read before the next time."""
        self._give_way = False

    def database_time(self) -> float:
        """Give the database's time as `Row.created_at` has it, as of the last read and our own clock since then."""
        return self._clock_offset + time.monotonic() * 1e6

    def wake(self) -> None:
        """Let `next_window` look around: there are new lanes, or `until` is set."""
        self._room.set()
        self._session.wake.set()

    def _has_room(self) -> bool:
        if not self._window.is_open or not (lanes := self._readable()):
            return False
        large = next((size for lane, size in self._large.items() if lane in lanes), None)
        return large is None or self._window.has_room_for(large)

    async def _is_stuck(self) -> bool:
        """Wait for room; return whether a large row waits for rows that do not settle, and other lanes can be read.

        Nothing else is read while it waits, or it would wait for ever beside a backlog. But what is under way may wait
        for queues that take nothing, and that must not stop every lane.
        """
        self._room.clear()
        settled = self._window.settled
        await wait_for_event(self._room, STUCK_AFTER if self._large else None)
        if self._room.is_set() or self._window.settled > settled or not self._window.is_open:
            return False
        return not self._large.keys() >= set(self._readable())

    def _lanes_with_room(self) -> list[int]:
        return [lane for lane in self._session.lanes if lane not in self.leaving and self._window.has_room(lane)]

    def _readable(self) -> list[int]:
        """Return the lanes with room: of those that are to be read from far back, the first."""
        lanes = self._lanes_with_room()
        far = next((lane for lane in self._far if lane in lanes), None)
        return [lane for lane in lanes if lane == far or lane not in self._far]

    async def _rest(self) -> None:
        if self._more:
            return
        idle = time.monotonic() - self._row_at
        doorbell = idle >= DOORBELL_AFTER
        if doorbell and await self._session.hold_doorbell(hold=True):
            return  # read once more first: whoever committed until now has not rung
        # A writer that tested the doorbell while we were busy and commits only now is found by polling:
        # after a tenth of the time that it took.
        until_due = max(0.0, self._due_at - time.monotonic())
        rest = min(max(idle / 10, SHORT_REST), self._settings.poll_interval, until_due)
        await self._session.rest(rest, listen=doorbell)

    async def _next_rows(self) -> list[Row]:
        now = time.monotonic()
        begins_sweep = now >= self._sweep_at
        if now >= self._due_at or begins_sweep:  # what is merely due is no find of the sweep
            await self._look_for_due(now)
        if begins_sweep:
            self._unswept, self._sweep_took = list(self._session.lanes), 0.0
            self._sweep_at = now + self._settings.sweep_interval
        horizon = self._open.horizon(self._known_until)
        known_until = self._session.written_at
        floor = self._open.floor(horizon)
        head, rows = await self._select(floor)
        reach = floor
        while (back := self._note_ended(head.message_id, horizon, reach)) is not None:
            # A long transaction has ended: its rows belong before what was just read. Another may end meanwhile.
            reach = back
            head, rows = await self._select(floor)
        if self._sweeping is not None and reach == floor:
            read_to = min(floor, self._floors[self._sweeping])
            self.sweep_finds += sum(
                row.lane == self._sweeping and row.id <= read_to and not self._backing_off.holds(row) for row in rows
            )
        rows = self._take(rows, head.id)
        for lane in self._floors:
            if lane not in self._reading:  # what has become visible there is still to be read
                self._floors[lane] = min(self._floors[lane], floor)
        ended = time.monotonic()
        if self._sweeping is not None:
            self._sweep_took += ended - now
            self._sweep_at = ended + max(self._settings.sweep_interval, self._sweep_took * SWEEP_SHARE)
        self._read_at = now
        self._known_until = known_until
        self._open.note_read(ended, head.id)
        return rows

    async def _select(self, floor: int) -> tuple[Row, list[Row]]:
        """Read from the lanes' floors, or from `floor` where that is lower; give the head and the rows."""
        for lane in self._lanes_with_room():
            if lane not in self._floors:
                self._floors[lane], self._far[lane] = 0, None
        lanes = self._readable()
        is_far = any(lane in self._far for lane in lanes)
        self._sweeping = None if is_far else next((lane for lane in self._unswept if lane in lanes), None)
        self._gone_back.clear()
        room, room_bytes = self._window.room
        self._limit_bytes = self._share(lanes, room_bytes)
        lanes = self._reading = [lane for lane in lanes if lane in self._limit_bytes]
        if self._sweeping not in lanes:
            self._sweeping = None
        floors = [0 if lane == self._sweeping else min(self._floors[lane], floor) for lane in lanes]
        share = max(1, len(lanes))  # none when the last of them has begun to leave
        self._limit = min(max(1, room // share), max(1, self._window.lane_quota // 4))
        parameters = {
            "lanes": array_text(lanes),
            "floors": array_text(floors),
            "held": array_text(
                id_ for lane, floor in zip(lanes, floors, strict=True) for id_ in self._window.ids(lane) if id_ > floor
            ),
            "rows": self._limit,
            "bytes": array_text(self._limit_bytes[lane] for lane in lanes),
        }
        async with self._session.use():
            asked_at = time.monotonic()
            await self._cursor.execute(self.statement, parameters, prepare=True)
            head, *rows = await fetch_rows(self._cursor)
        self._clock_offset = head.created_at - asked_at * 1e6
        self._due_at = max(time.monotonic() + head.backoff_ms / 1000, self._looked_at + DUE_INTERVAL)
        return head, rows

    def _share(self, lanes: Collection[int], room: int) -> dict[int, int]:
        """Return how many bytes each lane may bring; a lane whose large row has to wait is left out.

        The large rows go first, by turns. The other lanes have the rest, and a little in any case: a backlog of large
        rows must not keep them waiting.
        """
        left, shares = room, dict[int, int]()
        for lane, size in self._large.items():
            if lane in lanes and (size <= left if shares else self._window.has_room_for(size)):
                shares[lane] = size
                left -= size
        others = [lane for lane in lanes if lane not in self._large]
        return shares | dict.fromkeys(others, max(1, max(left, room // 4) // max(1, len(others))))

    def _note_ended(self, snapshot: bytes, horizon: int, reach: int) -> int | None:
        """Learn from a read's snapshot who runs; when a read from `reach` was too short, go back, and tell how far."""
        back = self._open.note(snapshot, horizon)
        if back is None or back >= reach:
            return None
        for lane in self._session.lanes:
            self.reread_from(lane, back)
        return back

    def _take(self, rows: list[Row], position: int) -> list[Row]:
        """Note what was read, and return it without the rows whose payload has to wait for room."""
        self._more = False
        for lane in self._reading:
            self._far.pop(lane, None)
            self._large.pop(lane, None)
        waiting = {row.lane: row for row in reversed(rows) if row.left_out}  # the first of its lane
        if waiting:
            rows = [row for row in rows if row.lane not in waiting or row.id < waiting[row.lane].id]
            self._large |= {lane: row.cost for lane, row in waiting.items() if row.cost > self._limit_bytes[lane]}
        if self._sweeping is not None:
            self._unswept.remove(self._sweeping)
        ended = set(self._reading)
        for lane, group in groupby(rows, itemgetter(0)):
            of_lane = list(group)
            self._window.add(lane, of_lane)
            last = of_lane[-1].id
            if len(of_lane) >= self._limit:
                self._floors[lane] = last
                self._more = True
                ended.discard(lane)
        for lane, row in waiting.items():
            self._floors[lane] = row.id - 1
            self._more = True
            ended.discard(lane)
        for lane in ended:
            self._floors[lane] = position
        lagging = set(self._reading) - ended
        self.behind = lagging | self._lagging
        self._lagging = lagging | self._lagging.difference(self._reading)
        # A lane without room waits for its turn until it has some: `forget` says so.
        self._more |= any(
            lane in self._far or lane in self._unswept or lane in self._large for lane in self._lanes_with_room()
        )
        if position <= FAR:  # how far a new lane is shows with the first read
            self._far.clear()
        for lane, before in self._gone_back.items():  # while we read
            self.reread_from(lane, before)
        return rows

    async def _look_for_due(self, now: float) -> None:
        self._looked_at = now
        held = array_text(chain.from_iterable(map(self._window.ids, self._session.lanes)))
        async with self._session.use() as connection:
            due = await (await connection.execute(self._due, {"held": held}, prepare=True)).fetchall()
        for lane, first in (*due, *self._backing_off.end(now)):
            if lane in self._session.lanes:
                self.reread_from(lane, first - 1)
