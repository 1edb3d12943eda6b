"""What happens to a key whose row is parked, and how it comes back."""

import asyncio
import gc
import tracemalloc
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from relay.config.settings import DatabaseSettings, KeyPolicy, Ordering, RelaySettings, Settings
from relay.engine.read.gate import ParkedKeys
from relay.engine.read.tail import Tail
from relay.engine.row import BYTES_PER_MOVE, ROWS_PER_MOVE, Blame, Fault, Row, pieces
from relay.engine.session.session import LaneSession
from relay.engine.settle.mark import Marker
from relay.engine.settle.parking import Parking
from relay.engine.settle.quarantine_table import QuarantineTable
from relay.operate.parked.read import ParkedSelection
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.follower import IN_ORDER, unhurried
from tests.engine.rows import ROW
from tests.support.bulk import discard, operate, retry
from tests.support.eventually import eventually


async def test_later_rows_of_a_held_key_wait_parked_behind_it_and_others_go_on(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    before = await outbox.insert("1")
    head = await outbox.insert_faulty()
    offered_with_it = await outbox.insert("1")
    other = await outbox.insert("2")

    async with run_node(max_attempts=2):
        await eventually(outbox.is_empty, "nothing pending")
        read_later = await outbox.insert("1")
        await eventually(outbox.is_empty, "nothing pending")
        assert sorted(await queue.ids(2)) == [before, other]

    assert await outbox.ids("parked") == [head, offered_with_it, read_later]
    for follower in (offered_with_it, read_later):
        assert await outbox.column("held_behind", follower) == head
        assert await outbox.column("attempts", follower) == 0


async def test_a_row_that_is_being_read_as_its_key_comes_to_be_held_waits_too(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.engine.settle.quarantine.PROBE_INITIAL", 60.0)
    head_is_refused, follower_is_read, head_is_parked = asyncio.Event(), asyncio.Event(), asyncio.Event()
    park, find_behind = Marker._write_parked, QuarantineTable.find_behind

    async def park_late(marker: Marker, faults: Sequence[Fault]) -> bool:
        head_is_refused.set()
        await follower_is_read.wait()
        is_parked = await park(marker, faults)
        head_is_parked.set()
        return is_parked

    async def find_late(table: QuarantineTable, rows: Collection[Row]) -> set[int]:
        behind = await find_behind(table, rows)
        if any(row.id == head + 1 for row in rows):
            follower_is_read.set()
            await head_is_parked.wait()
        return behind

    async with run_node(max_attempts=1):
        await outbox.insert("2", exchange="", routing_key="nowhere")  # now windows are looked at by the quarantine, too
        await eventually(lambda: outbox.are_aside([1]), "it waits for its route")
        monkeypatch.setattr(Marker, "_write_parked", park_late)
        monkeypatch.setattr(QuarantineTable, "find_behind", find_late)
        head = await outbox.insert_faulty("1")
        await head_is_refused.wait()
        follower = await outbox.insert("1")
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == [head, follower]
    assert await queue.everything() == []


async def test_many_rows_that_cannot_be_sent_are_parked_by_few_statements(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one they kept the rows of others waiting: 20,000 of them for half a minute."""
    parked: list[int] = []
    park = Marker._write_parked

    async def count(marker: Marker, faults: Sequence[Fault]) -> bool:
        parked.append(len(faults))
        return await park(marker, faults)

    monkeypatch.setattr(Marker, "_write_parked", count)
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, headers)"
        " SELECT 'customer', n::text, 'InvoiceIssued', '1', jsonb_build_object(repeat('x', 129 + n %% 2), 1)"
        " FROM generate_series(1, %s) AS n",
        [1000],
    )
    fine = await outbox.insert("fine")

    async with run_node():
        await eventually(outbox.is_empty, "nothing pending")

    assert sum(parked) == len(await outbox.ids("parked")) == 1000
    assert len(parked) <= 50
    assert await queue.ids(1) == [fine]
    wrong = await outbox.connection.execute(
        "SELECT FROM outbox.message WHERE state = 'parked'"
        " AND (attempts <> 1 OR last_error NOT LIKE 'not sent by the relay: header name%')"
    )
    assert wrong.rowcount == 0


async def test_rows_that_take_too_long_to_park_are_parked_fewer_at_a_time(
    outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    """They were tried again without end, and with them everything that was to be marked."""
    await outbox.connection.execute("""
        CREATE FUNCTION public.dawdle() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END $$;
        CREATE TRIGGER dawdle BEFORE INSERT ON outbox.message_parked FOR EACH ROW EXECUTE FUNCTION public.dawdle();
    """)
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, headers)"
        " SELECT 'customer', n::text, 'InvoiceIssued', '1', jsonb_build_object(repeat('x', 129), 1)"
        " FROM generate_series(1, 100) AS n"
    )
    database = settings.database.model_copy(update={"command_timeout": 2.0})

    async with run_node(settings.model_copy(update={"database": database})) as node:
        fine = await outbox.insert("fine")
        await eventually(outbox.is_empty, "nothing pending")
        assert node.snapshot().database_losses == {}

    assert len(await outbox.ids("parked")) == 100
    assert await queue.ids(1) == [fine]


async def test_a_parked_key_costs_a_few_bytes_and_holds_its_own_rows(
    outbox: Outbox, database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the text of each key in memory, 250,000 of them killed a relay of 128 MiB at each start."""
    monkeypatch.setattr("relay.engine.settle.parking.ROWS_PER_LOAD", 1000)
    keys = 20_000
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, parked_at)"
        " SELECT 'customer', n::text, 'InvoiceIssued', '1', 'parked', now() FROM generate_series(1, %s) AS n",
        [keys],
    )
    for key in range(keys - 50, keys + 50):
        await outbox.insert(str(key))
    cursor = await outbox.connection.execute("SELECT lane, id, aggregate_id FROM outbox.message_pending ORDER BY id")
    rows = [ROW._replace(lane=lane, id=id_, aggregate_id=key.encode()) for lane, id_, key in await cursor.fetchall()]
    async with await LaneSession.open(database) as session:
        retry = unhurried(session)
        tail = Tail(session, RelaySettings(), IN_ORDER, retry)
        parked = ParkedKeys()
        parking = Parking(session, tail, parked, retry)
        gc.collect()
        tracemalloc.start()
        await parking.load(range(16))
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        behind, free = parked.split(rows)
        await parking.park_behind(behind)

    assert [int(row.aggregate_id or b"") for row in free] == list(range(keys + 1, keys + 50))
    assert size < 32 * keys


def test_what_is_moved_at_once_is_bounded_in_rows_and_bytes() -> None:
    def lengths(*sizes: int) -> list[int]:
        faults = [Fault(ROW._replace(cost=size), "too large", Blame.ROW_FOR_GOOD) for size in sizes]
        return [len(piece) for piece in pieces(faults, sizes)]

    assert lengths() == []
    assert lengths(*[0] * (2 * ROWS_PER_MOVE + 1)) == [ROWS_PER_MOVE, ROWS_PER_MOVE, 1]
    assert lengths(1, BYTES_PER_MOVE + 1, 1, BYTES_PER_MOVE - 1, 1) == [1, 1, 2, 1]


async def test_many_rows_of_held_keys_are_parked_in_pieces(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in range(20):  # of several lanes: a read brings few rows of one
        await outbox.insert_faulty(str(key))
    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "parked")
    await outbox.insert_many(6 * ROWS_PER_MOVE, keys=20)
    moved: list[int] = []
    write = Parking._write_parked_behind

    async def note(parking: Parking, rows: Sequence[Row]) -> set[int]:
        moved.append(len(rows))
        return await write(parking, rows)

    monkeypatch.setattr(Parking, "_write_parked_behind", note)
    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "parked behind it")

    assert sum(moved) == 6 * ROWS_PER_MOVE
    assert max(moved) <= ROWS_PER_MOVE


async def test_a_held_key_is_still_held_after_a_restart(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    head = await outbox.insert_faulty()
    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "parked")
    follower = await outbox.insert("1")

    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == [head, follower]


@pytest.mark.parametrize("running", [True, False])
async def test_a_retried_key_follows_in_order(
    outbox: Outbox, queue: Reader, run_node: RunNode, database_url: str, running: bool
) -> None:
    head = await outbox.insert_faulty()
    followers = [await outbox.insert("1") for _ in range(20)]
    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "parked")
        await outbox.mend(head)
        if running:
            await operate(database_url, lambda c: retry(c, "outbox", ParkedSelection(ids=[head])))
            followers.append(await outbox.insert("1"))
            await eventually(outbox.is_empty, "sent")
    if not running:
        await operate(database_url, lambda c: retry(c, "outbox", ParkedSelection(ids=[head])))
        followers.append(await outbox.insert("1"))
        async with run_node(max_attempts=1):
            await eventually(outbox.is_empty, "sent")

    assert await outbox.ids("sent") == [head, *followers]
    assert await queue.ids(22) == [head, *followers]


async def test_a_discarded_row_lets_its_followers_go(
    outbox: Outbox, queue: Reader, run_node: RunNode, database_url: str
) -> None:
    head = await outbox.insert_faulty()
    followers = [await outbox.insert("1") for _ in range(5)]

    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "parked")
        await operate(
            database_url, lambda c: discard(c, "outbox", ParkedSelection(ids=[head]), by="ada", why="obsolete")
        )
        assert await queue.ids(5) == followers

    assert await outbox.ids("discarded") == [head]


async def test_no_follower_is_left_behind_when_rows_come_while_an_operator_retries(
    outbox: Outbox, queue: Reader, run_node: RunNode, database_url: str
) -> None:
    head = await outbox.insert_faulty()
    expected = [head]
    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "parked")
        await outbox.mend(head)
        retrying = asyncio.create_task(operate(database_url, lambda c: retry(c, "outbox", ParkedSelection(ids=[head]))))
        for _ in range(60):
            expected.append(await outbox.insert("1"))
            await asyncio.sleep(0)
        await retrying
        assert await queue.ids(61) == expected
        await eventually(outbox.is_empty, "sent")

    assert await outbox.ids("parked") == []


async def test_a_row_that_was_read_before_its_key_was_released_waits_for_those_before_it(
    outbox: Outbox, queue: Reader, run_node: RunNode, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator retries a parked row while the relay parks the next one behind it and has read a third one."""
    later_is_read, key_is_released = asyncio.Event(), asyncio.Event()
    select, park_behind = Tail._select, Parking._park_behind

    async def select_and_wait(tail: Tail, *asked: Any) -> tuple[Row, list[Row]]:
        head_row, rows = await select(tail, *asked)
        if any(row.id == ids[-1] and row.id > follower for row in rows) and not later_is_read.is_set():
            later_is_read.set()
            await key_is_released.wait()
        return head_row, rows

    async def park_late(parking: Parking, rows: Sequence[Row]) -> None:
        if rows[0].id == follower and not key_is_released.is_set():
            ids.append(await outbox.insert("1"))
            await later_is_read.wait()
            await outbox.mend(head)
            await operate(database_url, lambda c: retry(c, "outbox", ParkedSelection(ids=[head])))
            await park_behind(parking, rows)
            key_is_released.set()
        else:
            await park_behind(parking, rows)

    monkeypatch.setattr(Tail, "_select", select_and_wait)
    monkeypatch.setattr(Parking, "_park_behind", park_late)
    head, follower = await outbox.insert_faulty(), await outbox.insert("1")
    ids = [head, follower]
    async with run_node(max_attempts=1):
        assert await queue.ids(3) == ids
        await eventually(outbox.is_empty, "sent")


async def test_with_skip_the_key_goes_on(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    head = await outbox.insert_faulty()
    followers = [await outbox.insert("1") for _ in range(3)]

    async with run_node(max_attempts=2, key_policy=KeyPolicy.SKIP):
        assert await queue.ids(3) == followers
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == [head]


@pytest.mark.usefixtures("refused_by_broker")
async def test_with_skip_the_key_does_not_wait_for_a_row_that_backs_off(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    head = await outbox.insert_faulty()
    followers = [await outbox.insert("1") for _ in range(3)]

    async with run_node(key_policy=KeyPolicy.SKIP, backoff_initial=60.0, backoff_max=60.0):
        assert await queue.ids(3) == followers
        await eventually(lambda: sent(outbox, followers), "marked")

    assert await outbox.ids("pending") == [head]
    assert await outbox.column("attempts", head) == 1


async def sent(outbox: Outbox, ids: list[int]) -> bool:
    return await outbox.ids("sent") == ids


@pytest.mark.parametrize("key_policy", KeyPolicy)
async def test_without_order_by_key_a_faulty_row_is_parked_too(
    outbox: Outbox, queue: Reader, run_node: RunNode, key_policy: KeyPolicy
) -> None:
    head = await outbox.insert_faulty()
    await outbox.insert("1")

    async with run_node(max_attempts=2, ordering=Ordering.PIPELINED, key_policy=key_policy):
        await eventually(outbox.is_empty, "nothing pending")

    assert head in await outbox.ids("parked")


async def test_rows_with_the_most_and_the_least_attempts_that_there_are_end_parked(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """A console's role may write them: one more was out of range, and no statement of the relay succeeded."""
    rows = [await outbox.insert_faulty(key) for key in ("most", "least")]
    for row, attempts in zip(rows, (32_767, -32_768), strict=True):
        await outbox.connection.execute("UPDATE outbox.message SET attempts = %s WHERE id = %s", [attempts, row])
    fine = await outbox.insert("fine")

    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == rows
    assert await queue.ids(1) == [fine]
