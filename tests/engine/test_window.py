"""A window is bounded in rows and bytes, and each lane has its share of it."""

import json
from typing import LiteralString

import psycopg
import pytest

from relay.engine.read.positions import START_BYTES
from tests.engine.conftest import Outbox
from tests.engine.follower import Follow, Follower, insert
from tests.support.eventually import eventually


async def test_a_window_is_bounded_in_rows_and_no_lane_starves(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(3000, keys=1)
    rare = await outbox.insert("another key in another lane")

    follower = await follow(max_window_rows=160)

    await eventually(lambda: bool(follower.windows), "a first window")
    assert follower.windows[0] <= 160
    assert rare in follower.ids[: follower.windows[0]]
    assert len(follower.ids) <= 160


async def test_a_lane_is_behind_until_all_of_its_backlog_is_read(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(25, keys=1)
    follower = await follow(max_window_rows=160)
    await follower.counts(25)
    await outbox.insert((follower.rows[0].aggregate_id or b"").decode())
    await follower.counts(26)

    assert follower.windows == [10, 9, 6, 1]
    assert [bool(lanes) for lanes in follower.behind] == [True, True, True, False]


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
    assert len(set(follower.ids) - set(others)) <= 40  # a quarter of the window


async def test_a_late_row_of_a_lane_that_had_no_room_is_read_when_it_has(
    outbox: Outbox, writer: psycopg.AsyncConnection, follow: Follow
) -> None:
    late = await insert(writer, "0")
    await outbox.insert_many(3000, keys=1)
    follower = await follow(max_window_rows=160)
    await eventually(lambda: len(follower.ids) > 30, "its share of the window is taken")
    await writer.commit()
    await follower.has(*[await outbox.insert(key) for key in await outbox.keys_of_other_lanes()])

    await outbox.connection.execute("DELETE FROM outbox.message WHERE id = ANY(%s)", [follower.ids])
    follower.tail.forget(follower.rows)

    await follower.has(late)


async def test_a_window_is_bounded_in_bytes(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(200, keys=1, payload='"' + "x" * 100_000 + '"')

    follower = await follow(max_window_bytes=1 << 20)

    await eventually(lambda: bool(follower.windows), "a first window")
    # A lane may take a sixteenth of the bytes, and one row at least.
    assert sum(follower.windows) <= 12


@pytest.mark.parametrize(
    "value", ['"' + "x" * 100_000 + '"', f"[{', '.join(['1.' + '0' * 16383] * 8)}]"], ids=["long", "zeros"]
)
async def test_headers_count_as_bytes_too(outbox: Outbox, follow: Follow, value: str) -> None:
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, headers)"
        " SELECT 'customer', '1', 'InvoiceIssued', '1', %s::jsonb FROM generate_series(1, 200)",
        [f'{{"h": {value}}}'],
    )

    follower = await follow(max_window_bytes=1 << 20)

    await eventually(lambda: bool(follower.windows), "a first window")
    assert sum(follower.windows) <= 12


async def test_no_read_unpacks_what_many_rows_hold_compressed(outbox: Outbox, follow: Follow) -> None:
    """Each of these has 10 MB of headers in 115 KB of the table, and all of them would take as long as it takes."""
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, headers)"
        " SELECT 'customer', '1', 'InvoiceIssued', '1', jsonb_build_object('h', repeat('x', 10000000))"
        " FROM generate_series(1, 5)"
    )

    follower = await follow()
    await follower.counts(5)

    assert follower.windows == [1] * 5
    assert all((row.excess or b"").startswith(b"headers of 10000") for row in follower.rows)


async def test_headers_with_many_small_numbers_count_as_little(outbox: Outbox, follow: Follow) -> None:
    headers = json.dumps({f"number {n}": n for n in range(60)})
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, headers)"
        " SELECT 'customer', '1', 'InvoiceIssued', '1', %s FROM generate_series(1, 5)",
        [headers],
    )

    follower = await follow(max_window_bytes=1 << 22)
    await follower.counts(5)

    assert follower.windows == [5]


async def test_a_payload_that_was_compressed_elsewhere_counts_as_what_it_becomes(
    outbox: Outbox, follow: Follow
) -> None:
    fill: tuple[LiteralString, ...] = (
        "CREATE TABLE staging (body json, bytes bytea)",
        "INSERT INTO staging (body) SELECT to_json(repeat('x', 20000000))",
        "INSERT INTO staging (bytes) SELECT convert_to(repeat('x', 20000000), 'UTF8')",
        (
            "INSERT INTO outbox.message (aggregate_type, event_type, payload, payload_bytes) "
            "SELECT 'customer', 'InvoiceIssued', body, bytes FROM staging"
        ),
    )
    for statement in fill:
        await outbox.connection.execute(statement)

    follower = await follow(max_message_bytes=1 << 20)
    await follower.counts(2)

    assert all(row.size < 10_000 for row in follower.rows)
    assert all((row.excess or b"").startswith(b"2000000") for row in follower.rows)


async def test_rows_without_a_key_spread_over_the_lanes(outbox: Outbox, follow: Follow) -> None:
    for _ in range(32):
        await outbox.insert(None)

    follower = await follow()

    await eventually(lambda: len(follower.ids) == 32, "all read")
    cursor = await outbox.connection.execute("SELECT count(DISTINCT lane) FROM outbox.message")
    assert await cursor.fetchone() == (16,)


async def test_the_window_starts_small_and_grows_with_what_is_settled(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(60, payload=json_of(1_000_000))
    follower = await follow()
    await eventually(lambda: has_been_full(follower), "the first window is full")
    first = sum(row.size for row in follower.rows)

    await settle(outbox, follower)
    await eventually(lambda: sum(row.size for row in follower.rows) > first * 1.5, "a larger one")

    assert START_BYTES * 3 // 4 < first <= START_BYTES


async def test_large_rows_of_all_lanes_are_not_read_at_once(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(40, payload=json_of(500_000))
    small = await outbox.insert("small")

    follower = await follow(max_window_bytes=1_000_000)
    most = 0
    while len(set(follower.ids)) < 41:
        await eventually(lambda: bool(follower.rows), "the next rows")
        most = max(most, sum(row.size for row in follower.rows))
        await settle(outbox, follower)

    assert small in follower.ids
    assert len(follower.ids) == 41  # each once
    assert most <= 1_000_000


async def test_a_row_larger_than_the_window_goes_alone(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(20, payload=json_of(300_000))

    follower = await follow(max_window_bytes=65_536)
    while len(follower.ids) < 20:
        await eventually(lambda: bool(follower.rows), "the next row")
        assert len(follower.rows) == 1
        await settle(outbox, follower)


async def test_rows_that_are_stuck_keep_no_large_row_waiting(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(40, payload=json_of(10_000))
    follower = await follow(max_window_bytes=1_000_000)
    await follower.counts(40)  # which hold more than a quarter of the window

    large, small = await outbox.insert("large", payload=json_of(300_000)), await outbox.insert("small")

    await follower.has(large, small)


async def test_a_very_large_row_that_waits_for_stuck_ones_stops_no_other_lane(outbox: Outbox, follow: Follow) -> None:
    await outbox.insert_many(40, keys=1, payload=json_of(10_000))
    follower = await follow(max_window_bytes=1_000_000)
    await follower.counts(40)  # which hold more than a quarter of the window

    large = await outbox.insert("0", payload=json_of(900_000))
    small = [await outbox.insert(key) for key in await outbox.keys_of_other_lanes()]

    await follower.has(*small)
    assert large not in follower.ids
    await settle(outbox, follower)
    await follower.has(large)


async def test_what_comes_with_a_row_that_grows_fits_beside_it(outbox: Outbox, follow: Follow) -> None:
    """The headers of the first row are 600 bytes in the table, and 131 KB in a message."""
    zeros = ", ".join(["1." + "0" * 16383] * 8)
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, headers)"
        " SELECT 'customer', '1', 'InvoiceIssued', to_json(repeat('x', 10000)), CASE n WHEN 1 THEN %s::jsonb END"
        " FROM generate_series(1, 20) AS n",
        [f'{{"h": [{zeros}]}}'],
    )

    follower = await follow(max_window_bytes=1 << 20)
    await follower.counts(20)

    assert follower.windows[0] == 1
    assert len(set(follower.ids)) == 20


async def test_what_is_too_large_for_any_message_is_not_read(outbox: Outbox, follow: Follow) -> None:
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, event_type, payload, headers, trace_context) SELECT 'customer',"
        " 'InvoiceIssued', body, to_jsonb(h), to_jsonb(h) FROM (VALUES"
        " (to_json(repeat('x', 30000000)), NULL),"
        " ('1', json_build_object('h', repeat('x', 200000000))),"
        " ('1', json_build_object('h', repeat('x', 300000)))) AS large (body, h)"
    )

    follower = await follow(max_message_bytes=1 << 20)
    await follower.counts(3)

    assert all(row.size < 10_000 for row in follower.rows)
    assert sorted((row.excess or b"").decode().partition(" of ")[0] for row in follower.rows) == [
        "30000002 bytes are more than max_message_bytes (1048576)",
        "headers",
        "writer and trace_context",
    ]


def has_been_full(follower: Follower) -> bool:
    return sum(row.size for row in follower.rows) > START_BYTES * 3 // 4


def json_of(size: int) -> str:
    return '"' + "x" * (size - 2) + '"'


async def settle(outbox: Outbox, follower: Follower) -> None:
    """Let the rows that were read until now be gone from the table, and from the window."""
    rows, follower.rows = follower.rows, []
    await outbox.connection.execute("DELETE FROM outbox.message WHERE id = ANY(%s)", [[row.id for row in rows]])
    follower.tail.forget(rows)
