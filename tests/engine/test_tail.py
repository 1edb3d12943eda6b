"""The tail gives every committed row once, soon, and in order per key, whatever the order of the commits."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import psycopg
import pytest

from relay.engine.row import Row
from relay.engine.session import LaneSession
from relay.engine.tail import Tail
from relay.settings import DatabaseSettings, RelaySettings
from tests.engine.conftest import Outbox
from tests.support.eventually import eventually

INSERT = (
    "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
    " VALUES ('customer', %s, 'InvoiceIssued', '{}') RETURNING id"
)
NO_SWEEP = {"sweep_interval": 3600.0, "poll_interval": 0.05}


class Follow(Protocol):
    """Start to read all lanes, with these relay settings."""

    async def __call__(self, **settings: float) -> "Follower": ...


class Follower:
    """A tail whose windows are collected as they come; no row is ever settled."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.rows: list[Row] = []
        self.ids: list[int] = []
        self.windows: list[int] = []
        self.drain = asyncio.Event()

    async def write(self, session: LaneSession) -> None:
        """Change something now and then, as heartbeats and marks do."""
        while not self.drain.is_set():
            async with session.write() as connection:
                await connection.execute("SELECT pg_current_xact_id()")
            await asyncio.sleep(0.3)

    async def run(self) -> None:
        while (window := await self.tail.next_window(until=self.drain)) is not None:
            self.rows.extend(window)
            self.ids.extend(row.id for row in window)
            self.windows.append(len(window))

    async def counts(self, number: int) -> None:
        try:
            await eventually(lambda: len(self.ids) == number, "rows read")
        except TimeoutError:
            raise TimeoutError(f"{len(self.ids)} rows are read ({len(set(self.ids))} of them different)") from None

    async def has(self, *ids: int) -> None:
        try:
            await eventually(lambda: set(ids) <= set(self.ids), "rows read")
        except TimeoutError:
            raise TimeoutError(f"rows {sorted(set(ids) - set(self.ids))} are not read") from None


@pytest.fixture
async def follow(database: DatabaseSettings) -> AsyncIterator[Follow]:
    """`await follow(max_window_rows=...)` starts to read all lanes."""
    async with await LaneSession.open(database) as session:
        await session.take_lanes()
        followers: list[tuple[Follower, asyncio.Task[None]]] = []

        async def start(**settings: float) -> Follower:
            follower = Follower(Tail(session, RelaySettings(**{**NO_SWEEP, **settings})))
            followers.append((follower, asyncio.create_task(follower.run())))
            followers.append((follower, asyncio.create_task(follower.write(session))))
            return follower

        yield start
        for follower, task in followers:
            follower.drain.set()
            follower.tail.wake()
            await task


@pytest.fixture
async def writer(database_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A second writer, with a transaction of its own."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        yield connection


async def insert(connection: psycopg.AsyncConnection, key: str) -> int:
    row = await (await connection.execute(INSERT, [key])).fetchone()
    assert row is not None
    return int(row[0])


async def test_a_row_that_commits_after_a_higher_id_is_read(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    follower = await follow()
    late = await insert(writer, "1")
    higher = await outbox.insert("1")
    await follower.has(higher)

    await writer.commit()

    await follower.has(late)
    assert follower.ids == [higher, late]


async def test_the_very_first_row_is_read(outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow) -> None:
    """A sequence that was never used says that it stands at 1."""
    follower = await follow()
    await asyncio.sleep(0.2)  # some reads, of which nothing can be seen, on the empty table
    first = await insert(writer, "1")
    await follower.has(await outbox.insert("1"))

    await writer.commit()

    await follower.has(first)


async def test_a_late_row_is_read_when_its_transaction_is_the_youngest_of_all(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    """A snapshot does not name running transactions that are younger than the last one that has ended."""
    follower = await follow()
    await follower.has(await outbox.insert("1"))
    late = [await insert(writer, "1")]
    for _ in range(10):
        await asyncio.sleep(0.05)  # far longer than a read looks back
        late.append(await insert(writer, "1"))

    await writer.commit()

    await follower.has(*late)


async def test_a_row_of_a_savepoint_that_commits_late_is_read(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    follower = await follow()
    await insert(writer, "1")
    async with writer.transaction():
        late = await insert(writer, "1")
    await follower.has(await outbox.insert("1"))

    await writer.commit()

    await follower.has(late)


async def test_a_transaction_that_ran_long_is_read_when_it_ends_without_a_sweep(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    follower = await follow(max_window_rows=40_000)
    late = await insert(writer, "1")
    for turn in range(1, 5):  # far beyond what each read looks back
        await outbox.insert_many(3000)
        await follower.counts(3000 * turn)

    await writer.commit()

    await follower.has(late)


async def test_a_predecessor_that_committed_first_is_never_given_after_its_successor(
    outbox: Outbox, database_url: str, follow: Follow
) -> None:
    """Writers of one key wait for each other, as a lock on the business row makes them; other keys interleave."""
    follower = await follow()
    expected: dict[str, list[int]] = {str(key): [] for key in range(4)}
    locks = {key: asyncio.Lock() for key in expected}

    async def write(number: int) -> None:
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            for turn in range(40):
                key = str((number + turn) % 4)
                async with locks[key]:
                    id_ = await insert(connection, key)
                    await asyncio.sleep(0.001 * ((number * 7 + turn) % 9))
                    await connection.commit()
                    expected[key].append(id_)

    async with asyncio.TaskGroup() as writers:
        for number in range(6):
            writers.create_task(write(number))

    await follower.has(*(id_ for ids in expected.values() for id_ in ids))
    assert len(follower.ids) == 240
    for ids in expected.values():
        assert [id_ for id_ in follower.ids if id_ in set(ids)] == ids


async def test_a_writer_that_is_slow_between_id_and_insert_is_not_missed(
    outbox: Outbox, database_url: str, follow: Follow
) -> None:
    await outbox.connection.execute("""
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN PERFORM pg_sleep(0.5); RETURN new; END $$;
        CREATE TRIGGER slow BEFORE INSERT ON outbox.message
            FOR EACH ROW WHEN (new.aggregate_id = 'slow') EXECUTE FUNCTION slow()
    """)
    follower = await follow()
    await follower.has(await outbox.insert("1"))

    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as other:
        slow = asyncio.create_task(insert(other, "slow"))
        while not slow.done():
            await follower.has(await outbox.insert("1"))

    await follower.has(await slow)


async def test_what_no_rule_foresees_is_found_by_the_sweep(outbox: Outbox, follow: Follow) -> None:
    cursor = await outbox.connection.execute("SELECT nextval('outbox.message_id_seq')")
    row = await cursor.fetchone()
    assert row is not None
    follower = await follow(sweep_interval=0.2)
    await outbox.insert_many(10)
    await eventually(lambda: len(follower.ids) == 10, "the others read")

    late = await outbox.insert("1", id=row[0])

    await follower.has(late)


async def test_a_rolled_back_row_is_never_read(outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow) -> None:
    follower = await follow(sweep_interval=0.1)
    gone = await insert(writer, "1")
    first = await outbox.insert("1")
    await follower.has(first)

    await writer.rollback()
    second = await outbox.insert("1")

    await follower.has(second)
    assert gone not in follower.ids


async def test_a_window_is_bounded_in_rows_and_no_lane_starves(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(3000, keys=1)
    rare = await outbox.insert("another key in another lane")

    follower = await follow(max_window_rows=160)

    await eventually(lambda: bool(follower.windows), "a first window")
    assert follower.windows[0] <= 160
    assert rare in follower.ids[: follower.windows[0]]
    assert follower.tail.held <= 160


async def test_a_lane_that_is_not_settled_leaves_room_for_the_others(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(3000, keys=1)
    follower = await follow(max_window_rows=160)
    await eventually(lambda: len(follower.ids) > 30, "its share of the window is taken")

    others = [await outbox.insert(f"other-{n}") for n in range(20)]

    cursor = await outbox.connection.execute(
        "SELECT id FROM outbox.message WHERE id = ANY(%s) AND lane <> (SELECT lane FROM outbox.message WHERE id = %s)",
        [others, follower.ids[0]],
    )
    await follower.has(*(row[0] for row in await cursor.fetchall()))


async def test_a_late_row_of_a_lane_that_had_no_room_is_read_when_it_has(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    late = await insert(writer, "0")
    await outbox.insert_many(3000, keys=1)
    follower = await follow(max_window_rows=160)
    await eventually(lambda: len(follower.ids) > 30, "its share of the window is taken")
    await writer.commit()
    await follower.has(*[await outbox.insert(key) for key in await keys_of_other_lanes(outbox)])

    await outbox.connection.execute("DELETE FROM outbox.message WHERE id = ANY(%s)", [follower.ids])
    follower.tail.forget(follower.rows)

    await follower.has(late)


async def keys_of_other_lanes(outbox: Outbox) -> list[str]:
    """Give keys whose lanes are not that of key 0."""
    cursor = await outbox.connection.execute(
        "SELECT n::text FROM generate_series(1, 12) AS n"
        " WHERE hashtextextended('customer/' || n, 0) & 15 <> hashtextextended('customer/0', 0) & 15"
    )
    return [row[0] for row in await cursor.fetchall()]


async def test_a_window_is_bounded_in_bytes(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(200, keys=1, payload='"' + "x" * 100_000 + '"')

    follower = await follow(max_window_bytes=1 << 20)

    await eventually(lambda: bool(follower.windows), "a first window")
    # A lane may take a sixteenth of the bytes, and one row at least.
    assert sum(follower.windows) <= 12


async def test_rows_without_a_key_spread_over_the_lanes(outbox: Outbox, follow: Follow) -> None:
    for _ in range(32):
        await outbox.insert(None)

    follower = await follow()

    await eventually(lambda: len(follower.ids) == 32, "all read")
    cursor = await outbox.connection.execute("SELECT count(DISTINCT lane) FROM outbox.message")
    assert await cursor.fetchone() == (16,)
