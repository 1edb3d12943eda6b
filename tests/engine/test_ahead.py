"""Rows that are written behind a backlog are read ahead of it, and no row passes another of its key."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from math import inf

import psycopg
import pytest

from relay.engine.read import tail
from relay.engine.read.tail import AHEAD_INTERVAL, LOOK_BACK, Ahead
from tests.engine.conftest import Outbox
from tests.engine.follower import Follow, Follower, insert

BACKLOG = 3000
KEYS = 1000
AT_ONCE = {"max_window_rows": 160}


@pytest.fixture(autouse=True)
def as_often_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "AHEAD_INTERVAL", 0.0)


async def settle(outbox: Outbox, follower: Follower, until: Callable[[], bool]) -> None:
    """Settle rows as they are read, until then."""
    settled = 0
    while not until():
        rows = follower.rows[settled:]
        settled += len(rows)
        await outbox.connection.execute("DELETE FROM outbox.message WHERE id = ANY(%s)", [[row.id for row in rows]])
        follower.tail.forget(rows)
        await asyncio.sleep(0.001)


def has(follower: Follower, *ids: int) -> Callable[[], bool]:
    return lambda: set(ids) <= set(follower.ids)


def counts(follower: Follower, number: int) -> Callable[[], bool]:
    return lambda: len(follower.ids) >= number


def begins_above(follower: Follower, id_: int) -> Callable[[], bool]:
    return lambda: min(follower.tail._ahead.after.values(), default=0) >= id_


def assert_each_once_in_order(follower: Follower, number: int) -> None:
    assert len(follower.ids) == len(set(follower.ids)) == number
    by_key = defaultdict[object, list[int]](list)
    for row in follower.rows:
        by_key[row.key or row.id].append(row.id)
    assert all(ids == sorted(ids) for ids in by_key.values())


async def test_rows_behind_a_backlog_are_read_ahead_of_it_in_order(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(BACKLOG, keys=KEYS)
    follower = await follow(**AT_ONCE)
    await settle(outbox, follower, counts(follower, 1))
    live = [await outbox.insert(key) for key in ("fresh", "fresh", None, "7", "7", "8")]

    await settle(outbox, follower, has(follower, *live))

    assert len(follower.ids) < BACKLOG / 2
    await settle(outbox, follower, counts(follower, BACKLOG + len(live)))
    assert_each_once_in_order(follower, BACKLOG + len(live))


async def test_rows_behind_a_second_backlog_wait_for_neither(outbox: Outbox, follow: Follow) -> None:
    follower = await follow(**AT_ONCE)
    for number in range(2):
        await outbox.insert_many(BACKLOG, keys=KEYS)
        await settle(outbox, follower, begins_above(follower, (await outbox.ids("pending"))[-1]))
        await settle(outbox, follower, has(follower, await outbox.insert(f"fresh-{number}")))

    assert len(follower.ids) < BACKLOG
    await settle(outbox, follower, counts(follower, 2 * BACKLOG + 2))
    assert_each_once_in_order(follower, 2 * BACKLOG + 2)


async def test_a_row_is_not_read_ahead_of_what_was_committed_late(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    """The late row has a lower id than all that was read, and another transaction of its key comes after it."""
    late = await insert(writer, "late")
    await outbox.insert_many(BACKLOG, keys=KEYS)
    follower = await follow(**AT_ONCE)
    await settle(outbox, follower, counts(follower, 1))
    await settle(outbox, follower, has(follower, await outbox.insert("fresh")))
    await writer.commit()

    behind = await outbox.insert("late")

    await settle(outbox, follower, has(follower, late, behind))
    assert len(follower.ids) < BACKLOG
    await settle(outbox, follower, counts(follower, BACKLOG + 3))
    assert_each_once_in_order(follower, BACKLOG + 3)


async def test_a_delayed_row_holds_no_row_of_its_key_behind_a_backlog(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(BACKLOG, keys=KEYS)
    follower = await follow(**AT_ONCE)
    await settle(outbox, follower, counts(follower, 1))
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, available_at)"
        " VALUES ('customer', 'fresh', 'InvoiceIssued', '{}', now() + interval '1 h')"
    )

    await settle(outbox, follower, has(follower, await outbox.insert("fresh")))

    assert len(follower.ids) < BACKLOG


def test_a_lane_is_read_ahead_by_turns_from_where_its_backlog_was_found() -> None:
    begun = Ahead()
    assert not begun.is_due(inf)

    begun.note_read({1}, position=100, now=1.0)
    begun.note_read({1, 2}, position=200, now=1.0 + AHEAD_INTERVAL)

    assert begun.after == {1: 100, 2: 100}
    assert begun.is_due(1.0 + AHEAD_INTERVAL)
    begun.begin(2.0)
    assert not begun.is_due(3.0), "the backlog has its turn"
    begun.move({2}, position=300, now=2.0)
    assert begun.after == {1: 100, 2: 300}
    begun.move((), position=400, now=2.0 + LOOK_BACK)
    assert begun.after == {1: 300, 2: 300}
    begun.note_read({2}, position=500, now=20.0)
    assert begun.after == {2: 300}
    begun.note_read((), position=600, now=21.0)
    assert not begun.is_due(inf)
