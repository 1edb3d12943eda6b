"""Rows that leave the log, as they wait or as no read foresees them; and checkpoints of other clusters."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import psycopg
import pytest

from relay.config.settings import DatabaseSettings, RelaySettings
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read import log_positions, positions
from relay.engine.read.checkpoints import Checkpoints
from relay.engine.read.tail import Tail
from relay.engine.row import Blame, Fault, Row
from relay.engine.send.routes import Address
from relay.engine.session.session import LaneSession
from relay.engine.settle.mark import Delivered, Marker
from relay.engine.settle.quarantine_table import QuarantineTable
from tests.engine.conftest import Outbox
from tests.engine.follower import IN_ORDER, Follow, unhurried
from tests.support.eventually import eventually
from tests.support.log import ensure

pytestmark = pytest.mark.parametrize("storage", ["log"], indirect=True)

PLACE = "SELECT tableoid::regclass::text FROM outbox.message WHERE id = %s"
FAR = "SELECT setval('outbox.message_id_seq', (SELECT max(past) + 10 FROM outbox.segment))"
CHECKPOINTS = "SELECT count(*) FROM outbox.checkpoint"


class Reader:
    """What a node does with the log, one step after the other."""

    def __init__(self, session: LaneSession, given: dict[str, float]) -> None:
        self.session = session
        settings = RelaySettings(**{"sweep_interval": 3600.0, **given})
        retry, nothing = unhurried(session), nothing_at_all()
        self.tail = Tail(session, settings, IN_ORDER, retry)
        self.checkpoints = Checkpoints(session, self.tail.checkpoints, retry)
        self.marker = Marker(
            session, self.tail, nothing, nothing,
            quarantine=nothing, policy=IN_ORDER, delivered=Delivered(), retry=retry, settings=settings,
        )  # fmt: skip

    async def read(self) -> list[Row]:
        """Return all rows that come."""
        rows: list[Row] = []
        quiet = 0
        while quiet < 3:
            await self.write()
            await self.tail._tend_log()
            came = await self.tail._next_rows()
            rows += came
            quiet = 0 if came else quiet + 1
        return rows

    async def write(self) -> None:
        """Take a transaction id, as marks and heartbeats do."""
        async with self.session.write() as connection:
            await connection.execute("SELECT pg_current_xact_id()")

    async def mark(self, rows: list[Row]) -> None:
        await self.marker._write_sent(rows)
        self.tail.forget(rows)

    async def sweep(self) -> None:
        await self.tail._begin_log()
        self.tail._sweep.begin(self.tail._positions.read_to())
        while self.tail._sweep.is_running:
            await self.tail._tend_log()


def nothing_at_all() -> Any:
    return None


@asynccontextmanager
async def reading(database: DatabaseSettings, **settings: float) -> AsyncIterator[Reader]:
    """Open a session with all lanes; the one before it may still be ending."""
    async with await LaneSession.open(database) as session:
        while len(session.lanes.held) < 16:
            session.lanes.take(await lock_lanes(session))
        yield Reader(session, settings)


async def value(outbox: Outbox, statement: str, *values: object) -> Any:
    row = await (await outbox.connection.execute(statement.encode(), values)).fetchone()
    assert row is not None
    return row[0]


async def test_a_row_that_its_writer_delays_leaves_the_log_and_comes_when_it_is_due(
    outbox: Outbox, follow: Follow
) -> None:
    follower = await follow()
    due = await value(outbox, "SELECT now() + interval '0.7 s'")

    delayed = await outbox.insert("1", available_at=due)
    later = await outbox.insert("1")
    await follower.has(later)

    await eventually(lambda: is_in(outbox, delayed, "message_pending"), "it has left the log")
    assert follower.ids == [later]
    await follower.has(delayed)
    assert follower.ids == [later, delayed]


@pytest.mark.parametrize("by_hand", [100_000, 1 << 40], ids=["in the same segment", "in another"])
async def test_an_id_that_the_sequence_has_not_given_yet_does_not_stop_the_log(
    outbox: Outbox, follow: Follow, by_hand: int
) -> None:
    follower = await follow(sweep_interval=0.2)
    await follower.has(await outbox.insert("1"))

    await outbox.insert("1", id=by_hand)
    await follower.has(by_hand)

    assert await is_in(outbox, by_hand, "message_pending")
    last = await outbox.insert("1")
    await follower.has(last)
    assert len(follower.ids) == 3
    floors = [lane.floor for lane in follower.tail._positions._log._lanes.values()]
    assert max(floors) <= last


async def test_a_row_that_many_ids_have_passed_leaves_the_log_and_is_sent_once(
    database: DatabaseSettings, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "PASSED", 50)
    async with reading(database) as reader:
        stuck = await outbox.insert("1")
        (row,) = await reader.read()
        await outbox.insert_many(200, keys=100)
        others = await reader.read()
        await reader.mark(others)

        await reader.checkpoints.note()
        again = await reader.read()
        await reader.checkpoints.note()

        assert not again, "it is read twice"
        assert await is_in(outbox, stuck, "message_pending")
        await reader.mark([row])
        assert await outbox.ids("pending") == []
        assert await value(outbox, "SELECT count(*) FROM outbox.receipt WHERE %s = ANY (ids)", stuck) == 0
        low = await value(outbox, "SELECT max(low) FROM outbox.checkpoint, unnest(lows) AS low WHERE lanes[1] >= 0")
        assert low > stuck, "the checkpoint waits for it"
        assert not reader.session.segments.moved


async def test_a_backlog_that_many_ids_are_behind_stays_in_the_log(
    database: DatabaseSettings, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "PASSED", 50)
    async with reading(database, max_window_rows=64) as reader:
        await outbox.insert_many(1000, keys=100)
        rows = await reader.tail._next_rows()
        while not rows:
            rows = await reader.tail._next_rows()

        reader.tail.checkpoints()
        await reader.tail._tend_log()

        assert await value(outbox, "SELECT count(*) FROM outbox.message WHERE state = 'pending'") == 0


async def test_rows_that_are_left_to_the_table_come_again_without_a_sweep(
    database: DatabaseSettings, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "GAP", 0.0)
    async with reading(database) as reader:
        id_ = await outbox.insert("1")
        (row,) = await reader.read()

        reader.tail.leave([row])

        assert [row.id for row in await reader.read()] == [id_]
        assert await is_in(outbox, id_, "message_pending")


async def test_a_segment_that_was_dropped_a_moment_ago_stops_no_read(
    database: DatabaseSettings, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read begins far back, as a transaction has ended that began long ago."""
    monkeypatch.setattr(positions, "GAP", 0.0)
    async with reading(database) as reader:
        await outbox.insert_many(100)
        await reader.mark(await reader.read())
        await outbox.connection.execute("SELECT outbox.cut_segment()")
        last = await outbox.insert("1")
        assert [row.id for row in await reader.read()] == [last]
        await outbox.connection.execute("TRUNCATE outbox.message_log_1, outbox.receipt_1")
        await outbox.connection.execute("UPDATE outbox.segment SET emptied_at = now() WHERE number = 1")
        assert await value(outbox, "SELECT outbox.drop_segment()") == 1
        late = await outbox.insert("1", id=5)
        for lane in reader.tail._positions._log._lanes.values():
            lane.low = lane.base = 0

        assert [row.id for row in await reader.read()] == [late]


@pytest.mark.parametrize("change", ["move out", "postpone", "park", "set aside"])
async def test_a_row_of_far_moves_also_when_far_has_become_a_segment(
    database: DatabaseSettings, database_url: str, outbox: Outbox, change: str
) -> None:
    async with reading(database) as reader:
        await reader.read()
        await outbox.connection.execute(FAR)
        id_ = await outbox.insert("1")
        rows: list[Row] = []
        while not rows:  # one segment a read
            rows = await reader.read()
        (row,) = rows
        assert await is_in(outbox, id_, "message_log_far")
        with psycopg.connect(database_url, autocommit=True) as other:
            assert "changed" in ensure(other, ids=1 << 20)

        match change:
            case "move out":
                await reader.tail._move_out([row])
            case "postpone":
                await reader.marker._write_postponed(row, "refused", 0.0)
            case "park":
                await reader.marker._write_parked([Fault(row, "refused", Blame.ROW_FOR_GOOD)])
            case "set aside":
                table = QuarantineTable(reader.session, unhurried(reader.session))
                await table.set_aside(Address(b"", b"nowhere"), [row], "refused")

        places = {"park": "message_parked", "set aside": "message_quarantined"}
        assert await is_in(outbox, id_, places.get(change, "message_pending"))


async def test_a_row_that_is_marked_while_it_should_move_stays(
    database: DatabaseSettings, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "PASSED", 0)
    async with reading(database) as reader:
        id_ = await outbox.insert("1")
        (row,) = await reader.read()
        reader.tail.checkpoints()  # it is to move before the next read

        await reader.mark([row])

        assert await reader.read() == []
        assert not await is_in(outbox, id_, "message_pending")


@pytest.mark.parametrize("far", [0, 10_000], ids=["near", "far"])
async def test_the_sweep_finds_a_row_whose_id_was_taken_long_before(
    outbox: Outbox, follow: Follow, far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 0)
    follower = await follow(sweep_interval=0.2, max_window_rows=80_000)
    id_ = await value(outbox, "SELECT nextval('outbox.message_id_seq')")
    await outbox.insert_many(100 + far)
    await follower.counts(100 + far)
    await asyncio.sleep(0.5)  # so that no read begins before it

    await outbox.insert("1", id=id_)

    await follower.has(id_)
    assert follower.tail.sweep_finds == 1
    assert await is_in(outbox, id_, "message_pending")
    assert len(follower.ids) == len(set(follower.ids))


async def test_the_sweep_of_a_new_session_goes_on_where_that_before_it_was(
    database: DatabaseSettings, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "GAP", 0.0)
    taken = await value(outbox, "SELECT nextval('outbox.message_id_seq')")
    async with reading(database) as reader:
        await outbox.insert_many(1000)
        await reader.mark(await reader.read())
        await reader.sweep()
        await reader.checkpoints.note()
    await outbox.insert("1", id=taken)

    async with reading(database) as reader:
        assert await reader.read() == []
        swept = reader.tail._sweep.swept(range(16))
        assert min(checkpoint.seen.seen_to for checkpoint in swept.values()) > 0
        await reader.sweep()

        assert [row.id for row in await reader.read()] == [taken]
        assert reader.tail.sweep_finds == 1


@pytest.mark.parametrize(
    "again",
    [
        "TRUNCATE outbox.message RESTART IDENTITY",
        "DELETE FROM outbox.message; SELECT setval('outbox.message_id_seq', 1, false)",
    ],
    ids=["truncated", "set back"],
)
@pytest.mark.parametrize("restart", [False, True], ids=["same session", "next session"])
async def test_rows_whose_ids_come_again_are_sent(
    database: DatabaseSettings, outbox: Outbox, restart: bool, again: LiteralString, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 60)
    monkeypatch.setattr(positions, "GAP", 0.0)
    async with reading(database) as reader:
        await outbox.insert_many(200)
        await reader.mark(await reader.read())
        await reader.read()
        await reader.checkpoints.note()
        await outbox.connection.execute(again)
        await outbox.insert_many(100)
        if not restart:
            await assert_new_rows_come(reader)
            return

    async with reading(database) as reader:
        await assert_new_rows_come(reader)


async def assert_new_rows_come(reader: Reader) -> None:
    """The ids have leapt over many segments, and each read has one of them."""
    rows: list[Row] = []
    for _ in range(200):
        rows += await everything(reader)
        if len(rows) >= 100:
            break
    assert len({row.id for row in rows}) == len(rows) == 100


async def everything(reader: Reader) -> list[Row]:
    rows = await reader.read()
    await reader.sweep()
    return rows + await reader.read()


async def test_what_a_read_sends_to_the_server_does_not_grow_with_a_large_transaction(
    database: DatabaseSettings, outbox: Outbox, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "NEAR", 60)
    monkeypatch.setattr(positions, "GAP", 0.0)
    monkeypatch.setattr(log_positions, "SLICE", 1000)
    held = [0]
    plan = positions.Positions._plan

    def noted(*args: Any, **kwargs: Any) -> positions.Plan:
        planned = plan(*args, **kwargs)
        held.append(len(planned.held))
        return planned

    monkeypatch.setattr(positions.Positions, "_plan", noted)
    async with reading(database) as reader:
        await reader.read()
        await outbox.insert_many(100)
        await reader.mark(await reader.read())
        await writer.execute(
            "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
            " SELECT 'customer', (n % 100)::text, 'Issued', '1' FROM generate_series(1, 20000) AS n"
        )
        await outbox.insert_many(100)
        await reader.mark(await reader.read())
        await writer.commit()

        most = got = 0
        ids: set[int] = set()
        while got < 20_000:
            await reader.write()
            rows = await reader.tail._next_rows()
            got += len(rows)
            ids.update(row.id for row in rows)
            most = max(most, *held)
            if rows:
                await reader.mark(rows)

        assert most < 1000, f"{most} ids go with a read, though all of them are marked"
        assert len(ids) == got == 20_000, "a row was read twice"
        assert await outbox.is_empty()


async def test_a_checkpoint_of_another_cluster_is_none_and_neither_are_its_transaction_ids(
    database: DatabaseSettings, outbox: Outbox
) -> None:
    """As after a restore: the rows come from a cluster that was far ahead with its transactions."""
    async with reading(database) as reader:
        await outbox.insert_many(500)
        rows = await reader.read()
        await reader.mark(rows[:300])
        await reader.checkpoints.note()
    await outbox.connection.execute(
        "UPDATE outbox.checkpoint SET cluster = cluster + 1, lows = (SELECT array_agg(9999) FROM unnest(lows))"
    )
    await outbox.connection.execute("UPDATE outbox.message SET xid = xid + (1::bigint << 40)")

    async with reading(database) as reader:
        again = await reader.read()
        await reader.checkpoints.note()

        assert sorted(row.id for row in again) == sorted(row.id for row in rows[300:])
        new = await outbox.insert("1")
        assert [row.id for row in await reader.read()] == [new]
        await reader.mark(again)
        await reader.sweep()
        assert await reader.read() == []
        assert await value(outbox, "SELECT count(DISTINCT cluster) FROM outbox.checkpoint") == 1


async def test_checkpoints_do_not_pile_up(database: DatabaseSettings, outbox: Outbox) -> None:
    for _ in range(2):
        async with reading(database) as reader:
            for _ in range(3):
                await outbox.insert_many(20)
                await reader.mark(await reader.read())
                await reader.sweep()
                await reader.checkpoints.note()
            assert await value(outbox, CHECKPOINTS) <= 32
            before = await value(outbox, "SELECT max(number) FROM outbox.checkpoint")
            await reader.checkpoints.note()
            assert await value(outbox, "SELECT max(number) FROM outbox.checkpoint") == before, "nothing has moved"


async def test_a_checkpoint_stays_for_a_lane_that_another_node_has_now(
    database: DatabaseSettings, outbox: Outbox
) -> None:
    async with reading(database) as reader:
        await outbox.insert_many(100)
        await reader.mark(await reader.read())
        await reader.checkpoints.note()
        reader.session.lanes.release([3])

        await outbox.insert_many(100)
        await reader.read()
        await reader.checkpoints.note()

        assert await value(outbox, "SELECT count(*) FROM outbox.checkpoint WHERE 3 = ANY (lanes)") == 1


async def is_in(outbox: Outbox, id_: int, table: str) -> bool:
    place: str = await value(outbox, PLACE, id_)
    return place == f"outbox.{table}"
