"""A table and its writers without a server: transactions, snapshots and the tail's statements."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import ceil, inf
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any

from psycopg import Error
from psycopg.errors import LockNotAvailable
from psycopg.sql import SQL, Composed

from relay.engine.read.floors import IDENTIFY, LOAD, SAVE
from relay.engine.read.pending import CROWDED, DUE, DUE_FAR, READ, ROWS_OF_KEY
from relay.engine.read.positions import LaneFloor
from relay.engine.row import Row
from relay.engine.session.session import HeldLanes
from tests.engine.rows import ROW

LANES = 3
STATEMENTS = {"read": READ, "crowded": CROWDED, "due": DUE, "save": SAVE, "load": LOAD, "identify": IDENTIFY}


class GivesUp:
    """A retry that does not wait: the error comes out of the first try."""

    async def wait(self, error: Error, _: int) -> None:
        raise error

    async def report(self, error: Error, *, again: bool) -> None:  # noqa: ARG002
        raise error

    def heal(self) -> None:
        """Nothing: no statement succeeds after it has failed."""


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop that goes by a clock of the test and never waits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.time = clock  # type: ignore[method-assign]

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = self.create_task(coroutine)
        for _ in range(100):
            if task.done():
                return task.result()
            self.call_soon(self.stop)
            self.run_forever()
        raise AssertionError(f"{coroutine} waits for something")


@dataclass
class WrittenRow:
    """A row as its writer knows it; `began` and `committed` are moments, of which each has another number."""

    row: Row
    began: int
    xid: int
    committed: int = 0
    state: str = "pending"
    attempts: int = 0
    due: float = 0.0


@dataclass
class OpenTransaction:
    xid: int
    began: int
    rows: list[WrittenRow] = field(default_factory=list)


class World:
    """The table, the locks of its lanes and their saved floors, and the clock that all go by.

    Attributes:
        saved: the floors by lane; `saved_in` has the database in which each was saved.
        database: the one in which the table is now.
    """

    def __init__(self) -> None:
        self.clock = 100.0
        self.table: dict[int, WrittenRow] = {}  # committed rows by id
        self.running: dict[int, OpenTransaction] = {}
        self.saved: dict[int, LaneFloor] = {}
        self.saved_in: dict[int, str] = {}
        self.database = "first"
        self.owners: dict[int, WorldSession] = {}  # of the lanes' locks
        self._moments = self._ids = self._xids = 0
        self._ended = 0  # the highest transaction that has ended

    def begin(self) -> OpenTransaction:
        """Take a transaction id."""
        self._xids += 1
        transaction = self.running[self._xids] = OpenTransaction(self._xids, self._moment())
        return transaction

    def insert(self, transaction: OpenTransaction, key: int) -> None:
        self._ids += 1
        row = ROW._replace(
            lane=key % LANES, id=self._ids, message_id=b"%036d" % self._ids, aggregate_id=str(key).encode()
        )
        transaction.rows.append(WrittenRow(row, transaction.began, transaction.xid))

    def commit(self, transaction: OpenTransaction) -> None:
        self._end(transaction)
        for written in transaction.rows:
            written.committed = self._moment()
            self.table[written.row.id] = written

    def roll_back(self, transaction: OpenTransaction) -> None:
        self._end(transaction)

    def change(self, ids: Iterable[int], state: str) -> None:
        """Let the relay change rows, in a separate transaction."""
        self._end(self.begin())
        for id_ in ids:
            self.table[id_].state = state

    def copy(self) -> None:
        """Go on in another database, with the committed rows and what is saved. Ids of transactions begin again.

        The sequence is set to the highest id of the rows. A transaction of another application runs, without an end.
        """
        self.database = "second"
        self.running.clear()
        self._xids = self._ended = 0
        self._ids = max(self.table, default=0)
        for written in self.table.values():
            written.xid = 0
        self.begin()

    def snapshot(self) -> bytes:
        """Write it as PostgreSQL does: it names no running transaction above the last one that has ended."""
        end = self._ended + 1
        running = sorted(xid for xid in self.running if xid < end)
        return f"{running[0] if running else end}:{end}:{','.join(map(str, running))}".encode()

    def read(self, parameters: Mapping[str, Any]) -> list[Row]:
        """Answer the tail's READ in order."""
        rows = self._head()
        for lane, floor in zip(numbers(parameters["lanes"]), numbers(parameters["floors"]), strict=True):
            rows += self._pending(parameters, lane, floor)[: parameters["rows"]]
        return rows

    def read_ahead(self, parameters: Mapping[str, Any]) -> list[Row]:
        """Answer the tail's READ ahead of backlogs."""
        rows = self._head()
        floors = zip(*(numbers(parameters[name]) for name in ("lanes", "floors", "after")), strict=True)
        for lane, floor, after in floors:
            last = {row.key: row.id for row in self._pending(parameters, lane, after)[: parameters["rows"]]}
            pending = self._pending(parameters, lane, floor)
            first = [
                [row for row in pending if row.key == key and row.id <= id_][:ROWS_OF_KEY] for key, id_ in last.items()
            ]
            rows += sorted(chain.from_iterable(first), key=attrgetter("id"))[: parameters["rows"]]
        return rows

    def crowded(self, parameters: Mapping[str, Any]) -> list[tuple[int]]:
        """Answer the tail's CROWDED."""
        lanes = zip(numbers(parameters["lanes"]), numbers(parameters["after"]), strict=True)
        return [(lane,) for lane, after in lanes if len(self._pending(parameters, lane, after)) > parameters["most"]]

    def _head(self) -> list[Row]:
        waits = [self._wait(written) for written in self.table.values() if written.state == "pending" and written.due]
        head = ROW._replace(lane=-1, id=self._ids, message_id=self.snapshot(), created_at=0)
        return [head._replace(backoff_ms=min(waits, default=DUE_FAR))]

    def _pending(self, parameters: Mapping[str, Any], lane: int, above: int) -> list[Row]:
        held = set(numbers(parameters.get("held", "")))
        return [
            written.row._replace(attempts=written.attempts, backoff_ms=self._wait(written))
            for id_, written in sorted(self.table.items())
            if written.state == "pending" and written.row.lane == lane and id_ > above and id_ not in held
        ]

    def due(self, parameters: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Answer the tail's DUE."""
        held = set(numbers(parameters["held"]))
        first: dict[int, int] = {}
        for id_, written in sorted(self.table.items()):
            if written.state == "pending" and written.due and not self._wait(written) and id_ not in held:
                first.setdefault(written.row.lane, id_)
        return list(first.items())

    def floors(self) -> dict[int, LaneFloor]:
        """Return the saved floors as LOAD does."""
        waiting: dict[int, int] = {}
        for id_, written in sorted(self.table.items()):
            if written.state == "pending" and written.due and (written.attempts or not self._wait(written)):
                waiting.setdefault(written.row.lane, id_)
        return {
            lane: read._replace(floor=min(read.floor, waiting.get(lane, read.floor + 1) - 1))
            for lane, read in self.saved.items()
        }

    def save(self, parameters: Mapping[str, Any]) -> None:
        """Answer SAVE."""
        running = dict(zip(numbers(parameters["running"]), numbers(parameters["since"]), strict=True))
        for lane, floor in zip(numbers(parameters["lanes"]), numbers(parameters["floors"]), strict=True):
            self.saved[lane] = LaneFloor(floor, parameters["watermark"], running)
            self.saved_in[lane] = parameters["database"]

    def load(self, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Answer LOAD."""
        lanes = numbers(parameters["lanes"])
        return [
            (
                lane,
                read.floor,
                read.watermark,
                list(read.running),
                list(read.running.values()),
                read.watermark <= self._ids,
                self.saved_in[lane],
            )
            for lane, read in self.floors().items()
            if lane in lanes
        ]

    def lock(self, session: "WorldSession", parameters: Mapping[str, Any]) -> list[tuple[int]]:
        """Answer the LOCK of lanes, of which there are fewer here."""
        free = [lane for lane in numbers(parameters["lanes"]) if lane < LANES and lane not in self.owners]
        for lane in free[: parameters["number"]]:
            self.owners[lane] = session
        return [(lane,) for lane in free[: parameters["number"]]]

    def unlock(self, parameters: Mapping[str, Any]) -> None:
        """Answer the UNLOCK of lanes."""
        for lane in numbers(parameters["lanes"]):
            del self.owners[lane]

    def _wait(self, written: WrittenRow) -> int:
        return max(0, ceil(1000 * (written.due - self.clock)))

    def _end(self, transaction: OpenTransaction) -> None:
        del self.running[transaction.xid]
        self._ended = max(self._ended, transaction.xid)

    def _moment(self) -> int:
        self._moments += 1
        return self._moments


class WorldSession:
    """What tail, floors and lanes need of a session, without a lane yet.

    Attributes:
        answers: how many statements it answers before it refuses the others.
        between_reads: called once, before a read that repeats the one just made, from further back, or a read ahead.
    """

    schema = "outbox"
    nodes_channel = "outbox.nodes"

    def __init__(self, world: World) -> None:
        self.lanes = HeldLanes()
        self.wake = asyncio.Event()
        self.written_at = 0.0
        self.adapters = SimpleNamespace(register_loader=lambda *_: None)
        self.row_factory: object = None
        self.pgresult = None
        self.answers = inf
        self.between_reads: Callable[[], Awaitable[None]] | None = None
        self.reads = 0
        self._world = world
        self._rows: Sequence[Any] = ()

    def cursor(self) -> "WorldSession":
        return self

    def sql(self, statement: SQL, *, source: Composed | None = None, **_names: object) -> str:
        if source is not None and "owned.after" in source.as_string():
            return "read ahead"
        return next(kind for kind, known in STATEMENTS.items() if statement is known)

    @asynccontextmanager
    async def use(self) -> AsyncIterator["WorldSession"]:
        yield self

    async def execute(
        self, statement: str | Composed, parameters: Mapping[str, Any] = MappingProxyType({}), *, prepare: bool = False
    ) -> "WorldSession":
        if self.answers == 0:
            raise LockNotAvailable
        self.answers -= 1
        match statement:
            case "read":
                assert prepare
                self.reads += 1
                if self.reads > 1:
                    await self._do_between_reads()
                self._rows = self._world.read(parameters)
            case "read ahead":
                assert prepare
                await self._do_between_reads()
                self._rows = self._world.read_ahead(parameters)
            case "crowded":
                assert prepare
                self._rows = self._world.crowded(parameters)
            case "due":
                assert prepare
                self._rows = self._world.due(parameters)
            case "save":
                self._world.save(parameters)
            case "load":
                self._rows = self._world.load(parameters)
            case "identify":
                self._rows = [(self._world.database,)]
            case Composed() if "pg_try_advisory_lock" in statement.as_string():
                self._rows = self._world.lock(self, parameters)
            case _:
                self._world.unlock(parameters)
        return self

    async def _do_between_reads(self) -> None:
        if (between := self.between_reads) is not None:
            self.between_reads = None
            await between()

    async def fetchall(self) -> Sequence[Any]:
        return self._rows


def numbers(array: str) -> list[int]:
    return [int(number) for number in array.strip("{}").split(",") if number]
