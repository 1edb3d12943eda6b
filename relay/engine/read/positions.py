"""How far each lane is read, and what the next read asks for: decisions only, no statement and no waiting.

Ids are given before commit, so a row may become visible behind a higher id. The positions remember for each lane how
far it was read (its floor). They go back when a transaction that was running during an earlier read has ended: to the
position at which that transaction was first seen. All decisions about what was missed go by the snapshot of the read
itself. No rule foresees an id that was taken long before its row was inserted. The sweep finds such a row, as it reads
from zero: the row's state, not its position, is the truth.

A read from far back walks over every dead row that cannot be vacuumed yet, and there may be tens of millions. So only
one lane at a time is read in that way.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

from relay.config.settings import RelaySettings
from relay.engine.row import Row
from relay.engine.session.session import HeldLanes
from relay.runtime.memory import beside

SWEEP_SHARE = 50  # a sweep takes at most this part of the time
FAR = 100_000  # ids; a read that starts so far behind the last one may walk over many dead rows
GAP = 0.05  # seconds between taking an id and taking a transaction id, at most (the sweep catches the rest)
NEAR = 5_000  # ids: running transactions that started within them are awaited by reading from there each time
LANE_SHARE = 4  # a lane may hold this part of the window: one whose key is stuck must not fill all of it
AHEAD_SHARE = 4  # a read ahead of the backlogs brings this part of the window at most
READ_SHARE = 4  # a read brings this part of the window at most: its rows are in libpq's memory at the same time
START_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """One read of the table.

    Attributes:
        lanes: the lanes that it reads.
        floors: for each of them, the id above which it reads.
        held: ids above these floors that were read before and are still under way.
        rows: how many rows a lane may bring.
        bytes: how many bytes each lane may bring.
        sweeping: the lane that it reads from zero for the sweep.
        watermark: the highest id that was taken before the transactions that its snapshot names.
        floor: the id above which every lane must be read for transactions that run now.
        reach: the lowest id above which this read, or the one that it repeats, was asked to read.
    """

    lanes: list[int]
    floors: list[int]
    held: list[int]
    rows: int
    bytes: dict[int, int]
    sweeping: int | None
    watermark: int
    floor: int
    reach: int


class LaneFloor(NamedTuple):
    """How far a lane was read. The session that holds it next goes on from there.

    Attributes:
        floor: each pending row at or below it is due, has failed before, or belongs to a transaction in `running`.
        watermark: each id at or below it belongs to a transaction that has ended, or to one in `running`.
        running: transaction id -> the position at which it was first seen.
    """

    floor: int
    watermark: int
    running: Mapping[int, int]


class Positions:
    """The floors of the lanes that a session holds, and the window of rows that are under way.

    A read begins with `plan`. While `plan_again` returns a longer plan, that is read instead; then follow `end_read`
    and `take`. Times are monotonic.

    Attributes:
        has_more: whether a lane may have more rows than were read of it.
        behind: lanes of which the last read has not brought all rows, or only the rest of a backlog.
    """

    def __init__(self, lanes: HeldLanes, settings: RelaySettings, now: float) -> None:
        self._lanes = lanes
        self._window = Window(settings)
        self._floors: dict[int, int] = {}  # lane -> everything visible at or below was read
        self._far: dict[int, None] = {}  # lanes to read from far back, in the order of their turn
        self._large: dict[int, int] = {}  # lane -> cost of its next row, which did not fit, in the order of their turn
        self._gone_back: dict[int, int] = {}  # lane -> how far, since the last read began
        self._planned: Collection[int] = ()  # lanes of the read that has begun; the lock is free before it is repeated
        self._open = OpenTransactions()
        self._sweep_interval = settings.sweep_interval
        self._sweep_at = now + settings.sweep_interval
        self._sweep_took = 0.0  # seconds, so far
        self._unswept: list[int] = []  # lanes whose turn in the sweep is to come
        self._lagging: set[int] = set()  # lanes whose last read has not brought all
        self.has_more = True
        self.behind: set[int] = set()

    def has_room(self) -> bool:
        """Whether enough rows have been settled for another read."""
        if not self._window.is_open or not (lanes := self._readable()):
            return False
        large = next((size for lane, size in self._large.items() if lane in lanes), None)
        return large is None or self._window.has_room_for(large)

    @property
    def settled(self) -> int:
        """Bytes of all rows that were forgotten."""
        return self._window.settled

    @property
    def has_large(self) -> bool:
        """Whether a row waits that is too large for the room there is."""
        return bool(self._large)

    def has_room_beside_large(self, settled: int) -> bool:
        """Whether nothing has settled since that many bytes had, and lanes without a large row can be read."""
        if self._window.settled > settled or not self._window.is_open:
            return False
        return not self._large.keys() >= set(self._readable())

    def forget(self, rows: Iterable[Row]) -> None:
        """Forget rows that are settled, or left to the table."""
        self.has_more |= self._window.forget(rows)  # a lane that was left out until now

    def is_clear(self, lane: int) -> bool:
        """Whether no row of the lane is under way, and no read that has begun may bring one."""
        return not self._window.ids(lane) and lane not in self._planned

    def under_way(self) -> Iterable[int]:
        """Return the ids of all rows that were read and not forgotten."""
        return chain.from_iterable(map(self._window.ids, self._lanes.held))

    def enter(self, lanes: Iterable[int], floors: Mapping[int, LaneFloor]) -> None:
        """Read these lanes from their floors; a lane without a floor, from the start."""
        for lane in lanes:
            if (read := floors.get(lane)) is None:
                self._floors[lane], self._far[lane] = 0, None
                continue
            self._open.adopt(read.running, read.watermark)
            self._floors[lane] = read.floor
            if read.floor < read.watermark - FAR:
                self._far[lane] = None
        self.has_more = True

    def floors(self, known_until: float) -> dict[int, LaneFloor]:
        """Return how far each lane is read and settled.

        Args:
            known_until: as `plan` takes it.
        """
        watermark, running = self._open.watermark(known_until), self._open.running()
        return {
            lane: LaneFloor(min(self._floors[lane], watermark, *self._before(lane)), watermark, running)
            for lane in self._lanes.held
            if lane in self._floors
        }

    def _before(self, lane: int) -> list[int]:
        """Return the position before the first row of a lane that is under way, if there is one."""
        return [min(ids) - 1] if (ids := self._window.ids(lane)) else []

    def reread_from(self, lane: int, before: int = 0) -> None:
        """Read a lane again from the first id above `before`; what is under way is not read twice."""
        floor = self._floors.get(lane, 0)
        if floor > before:
            self._floors[lane] = before
        if floor > before + FAR:
            self._far[lane] = None
        self._gone_back[lane] = min(self._gone_back.get(lane, before), before)
        self.has_more = True

    @property
    def is_sweeping(self) -> bool:
        """Whether the next read may bring a lane of a sweep that has begun."""
        return bool(self._unswept) and any(lane in self._unswept for lane in self._lanes_with_room())

    def is_sweep_due(self, now: float) -> bool:
        return now >= self._sweep_at

    def begin_sweep(self, now: float) -> None:
        """Read every lane from zero once, one lane a read."""
        self._unswept, self._sweep_took = list(self._lanes.held), 0.0
        self._sweep_at = now + self._sweep_interval

    def plan(self, known_until: float) -> Plan:
        """Return the next read.

        Args:
            known_until: the snapshot of the last read named all running transactions that had an id by then.
        """
        watermark = self._open.watermark(known_until)
        floor = self._open.floor(watermark)
        return self._plan(watermark, floor, reach=floor)

    def plan_again(self, plan: Plan, snapshot: bytes) -> Plan | None:
        """Note the transactions that run in a read's snapshot; return a plan that goes further back, if one is needed.

        A long transaction has ended: its rows belong before what was just read. Another may end meanwhile.
        """
        back = self._open.note(snapshot, plan.watermark)
        if back is None or back >= plan.reach:
            return None
        for lane in self._lanes.held:
            self.reread_from(lane, back)
        return self._plan(plan.watermark, plan.floor, reach=back)

    def plan_ahead(self, known_until: float, after: Collection[int]) -> Plan | None:
        """Return a read ahead of the backlogs of these lanes; None when there is no room for one.

        Below its floors, the table has only rows that were read, and rows of transactions that ran during the last
        read. So a read that finds one of these ended is void (`has_missed`).

        Args:
            known_until: as `plan` takes it.
        """
        watermark = self._open.watermark(known_until)
        floor = self._open.floor(watermark)
        lanes = [lane for lane in self._readable() if lane in after and lane not in self._far]
        if not lanes or self._large:
            return None
        room, room_bytes = self._window.room
        rows = min(room, self._window.max_rows // AHEAD_SHARE) // len(lanes)
        floors = [min(self._floors[lane], floor) for lane in lanes]
        self._planned = lanes
        return Plan(
            lanes,
            floors,
            self._held(lanes, floors),
            max(1, min(rows, self._window.lane_quota // 4)),
            dict.fromkeys(lanes, max(1, room_bytes // AHEAD_SHARE // len(lanes))),
            None,
            watermark,
            floor,
            floor,
        )

    def has_missed(self, plan: Plan, snapshot: bytes) -> bool:
        """Whether a transaction has ended that ran during the last read, and may have rows below those of this one."""
        back = self._open.ended(snapshot)
        return back is not None and back < plan.reach

    def take_ahead(self, rows: list[Row]) -> list[Row]:
        """Note what a read ahead has brought; return it without the rows that did not fit and those behind them."""
        rows, _ = without_left_out(rows)
        for lane, group in groupby(rows, itemgetter(0)):
            self._window.add(lane, list(group))
        return rows

    def end_read(self) -> None:
        """Note that the read has brought its rows, which `take` notes at once, or has failed."""
        self._planned = ()

    def found_by_sweep(self, plan: Plan, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of a read that only its sweep has found. Call it before `take`."""
        if plan.sweeping is None or plan.reach != plan.floor:
            return []
        read_to = min(plan.floor, self._floors[plan.sweeping])
        return [row for row in rows if row.lane == plan.sweeping and row.id <= read_to]

    def take(self, plan: Plan, rows: list[Row], position: int, *, began: float, ended: float) -> list[Row]:
        """Note what a read has brought, and return it without the rows whose payload has to wait for room.

        Args:
            position: the highest id that was given when it was made.
        """
        self.has_more = False
        for lane in plan.lanes:
            self._far.pop(lane, None)
            self._large.pop(lane, None)
        rows, waiting = without_left_out(rows)
        if waiting:
            self._large |= {lane: row.cost for lane, row in waiting.items() if row.cost > plan.bytes[lane]}
        self._move_floors(plan, rows, waiting, position)
        # A lane without room waits until it has some; then `forget` sets `has_more`.
        self.has_more |= any(
            lane in self._far or lane in self._unswept or lane in self._large for lane in self._lanes_with_room()
        )
        if position <= FAR:  # how far a new lane is shows with the first read
            self._far.clear()
        for lane, before in self._gone_back.items():  # while we read
            self.reread_from(lane, before)
        for lane in self._floors:
            if lane not in plan.bytes:  # what has become visible there is still to be read
                self._floors[lane] = min(self._floors[lane], plan.floor)
        if plan.sweeping is not None:
            self._sweep_took += ended - began
            self._sweep_at = ended + max(self._sweep_interval, self._sweep_took * SWEEP_SHARE)
        self._open.note_read(ended, position)
        return rows

    def _move_floors(self, plan: Plan, rows: list[Row], waiting: dict[int, Row], position: int) -> None:
        if plan.sweeping is not None:
            self._unswept.remove(plan.sweeping)
        ended = set(plan.lanes)
        for lane, group in groupby(rows, itemgetter(0)):
            of_lane = list(group)
            self._window.add(lane, of_lane)
            last = of_lane[-1].id
            if len(of_lane) >= plan.rows:
                self._floors[lane] = last
                self.has_more = True
                ended.discard(lane)
        for lane, row in waiting.items():
            self._floors[lane] = row.id - 1
            self.has_more = True
            ended.discard(lane)
        for lane in ended:
            self._floors[lane] = position
        lagging = set(plan.lanes) - ended
        self.behind = lagging | self._lagging.intersection(self._lanes.staying)
        self._lagging = lagging | self._lagging.intersection(self._lanes.staying).difference(plan.lanes)

    def _plan(self, watermark: int, floor: int, *, reach: int) -> Plan:
        for lane in self._lanes_with_room():
            if lane not in self._floors:
                self._floors[lane], self._far[lane] = 0, None
        lanes = self._readable()
        is_far = any(lane in self._far for lane in lanes)
        room, room_bytes = self._window.room
        shares = self._share(lanes, room_bytes)
        sweeping = None if is_far else next((lane for lane in self._unswept if lane in lanes), None)
        if sweeping not in shares:
            sweeping = None
        lanes = [lane for lane in lanes if lane in shares]
        floors = [0 if lane == sweeping else min(self._floors[lane], floor) for lane in lanes]
        most = max(1, room // max(1, len(lanes)))  # no lane when the last of them has begun to leave
        self._gone_back.clear()
        self._planned = lanes
        return Plan(
            lanes,
            floors,
            self._held(lanes, floors),
            min(most, max(1, self._window.lane_quota // 4)),
            shares,
            sweeping,
            watermark,
            floor,
            reach,
        )

    def _held(self, lanes: Iterable[int], floors: Iterable[int]) -> list[int]:
        return [id_ for lane, above in zip(lanes, floors, strict=True) for id_ in self._window.ids(lane) if id_ > above]

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

    def _lanes_with_room(self) -> list[int]:
        return [lane for lane in self._lanes.staying if self._window.has_room(lane)]

    def _readable(self) -> list[int]:
        """Return the lanes with room; of the lanes to read from far back, only the first whose row need not wait."""
        lanes = self._lanes_with_room()
        far = min((lane for lane in self._far if lane in lanes), key=self._has_to_wait, default=None)
        return [lane for lane in lanes if lane == far or lane not in self._far]

    def _has_to_wait(self, lane: int) -> bool:
        size = self._large.get(lane)
        return size is not None and not self._window.has_room_for(size)


def without_left_out(rows: list[Row]) -> tuple[list[Row], dict[int, Row]]:
    """Return the rows ahead of the first of each lane that was left out, and these first rows by lane."""
    waiting = {row.lane: row for row in reversed(rows) if row.left_out}
    if waiting:
        rows = [row for row in rows if row.lane not in waiting or row.id < waiting[row.lane].id]
    return rows, waiting


class OpenTransactions:
    """Transactions that run while the table is read: their rows will become visible behind rows that were read.

    They decide how far back the next read must begin. Times are monotonic, positions are ids.
    """

    def __init__(self) -> None:
        self._since: dict[int, int] = {}  # transaction id -> the position at which it was first seen
        self._positions: deque[tuple[float, int]] = deque([(0.0, 0)])  # (after a read, highest id given by then)

    def adopt(self, running: Mapping[int, int], watermark: int) -> None:
        """Go on with what another session has noted; a watermark counts until the first read."""
        for xid, since in running.items():
            self._since[xid] = min(since, self._since.get(xid, since))
        at, position = self._positions[-1]
        if not at:
            self._positions[-1] = at, max(position, watermark)

    def running(self) -> dict[int, int]:
        """Return the transactions that ran during the last read, and where each was first seen."""
        return dict(self._since)

    def watermark(self, known_until: float) -> int:
        """Return the highest position up to which each id belongs to a transaction that had its own id by then."""
        while len(self._positions) > 1 and self._positions[1][0] <= known_until - GAP:
            self._positions.popleft()
        return self._positions[0][1]

    def floor(self, watermark: int) -> int:
        """Return the position from which to read the rows of transactions that run now, or have just begun."""
        position = self._positions[-1][1]
        return min([watermark, *(since for since in self._since.values() if position - since <= NEAR)])

    def ended(self, snapshot: bytes) -> int | None:
        """Return where the first one was first seen that ran during the last read and has ended, if there is one."""
        running = named_by(snapshot)
        return min((since for xid, since in self._since.items() if xid not in running), default=None)

    def note(self, snapshot: bytes, watermark: int) -> int | None:
        """Note what runs; return the lowest position at which a transaction that has ended was first seen, if any."""
        running = named_by(snapshot)
        ended = [self._since.pop(xid) for xid in self._since.keys() - running]
        for xid in running - self._since.keys():
            self._since[xid] = watermark
        return min(ended, default=None)

    def note_read(self, at: float, position: int) -> None:
        """Note that a read has ended at that time; `position` was the highest id given when it was made."""
        self._positions.append((at, position))


def named_by(snapshot: bytes) -> set[int]:
    """Return the running transactions that a snapshot names, as `pg_current_snapshot()` writes it."""
    return {int(xid) for xid in snapshot.split(b":")[2].split(b",") if xid}


class Window:
    """The rows that were read and are not yet settled, bounded in rows and bytes, and fair to every lane.

    The bound in bytes starts low and grows with what is settled. A relay that was killed for its memory thus makes
    progress after each start, and sends only a few rows again.

    Attributes:
        max_rows: rows that all may hold.
        lane_quota: rows that one lane may hold.
        settled: bytes that have left it.
    """

    def __init__(self, settings: RelaySettings) -> None:
        self.max_rows, self._most_bytes = settings.max_window_rows, settings.max_window_bytes
        self._largest = settings.max_message_bytes
        self._max_bytes = min(START_BYTES, self._most_bytes)  # grows
        self._sizes = defaultdict[int, dict[int, int]](dict)  # lane -> id -> bytes
        self._rows = self._bytes = self.settled = 0
        self.lane_quota = max(1, settings.max_window_rows // LANE_SHARE)

    @property
    def room(self) -> tuple[int, int]:
        """How many rows and bytes a read may bring."""
        return self.max_rows - self._rows, min(self._max_bytes - self._bytes, self._max_bytes // READ_SHARE)

    @property
    def is_open(self) -> bool:
        """Whether a quarter is free: a read costs a statement, and a few rows are not worth it while many wait."""
        return self._rows <= self.max_rows * 3 // 4 and self._bytes <= self._max_bytes * 3 // 4

    def has_room(self, lane: int) -> bool:
        return len(self._sizes[lane]) <= self.lane_quota * 3 // 4

    def has_room_for(self, size: int) -> bool:
        """Whether a row of so many bytes may be read. One above a quarter may when little else is under way."""
        if size <= self._max_bytes // READ_SHARE:
            return self._bytes + size <= self._max_bytes
        return self._bytes <= beside(size, self._max_bytes, self._largest)

    def ids(self, lane: int) -> Collection[int]:
        return self._sizes[lane]

    def add(self, lane: int, rows: Iterable[Row]) -> None:
        """Add rows of one lane."""
        sizes = {row.id: row.size for row in rows}
        self._sizes[lane] |= sizes
        self._rows += len(sizes)
        self._bytes += sum(sizes.values())

    def forget(self, rows: Iterable[Row]) -> bool:
        """Forget rows; return whether a lane that had no room has some again."""
        opened = False
        settled = 0
        for row in rows:
            of_lane = self._sizes[row.lane]
            size = of_lane.pop(row.id, 0)
            if size:
                self._rows -= 1
                settled += size
                opened |= len(of_lane) == self.lane_quota * 3 // 4
        self._bytes -= settled
        self.settled += settled
        self._max_bytes = min(self._max_bytes + settled, self._most_bytes)
        return opened
