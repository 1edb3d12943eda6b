"""Parked rows are listed, shown and chosen."""

from dataclasses import replace
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.errors import NotFoundError
from relay.operate.messages.whereabouts import WhyMissing
from relay.operate.parked.read import ParkedSelection, list_parked, show_parked
from relay.operate.parked.work import ParkedDone
from relay.servers.postgres.tables import Tables
from tests.operate.rows import Rows
from tests.support.bulk import preview, retry

EVERYTHING = ParkedSelection()
PENDING = ("pending", None)


def test_a_row_whose_head_has_gone_can_be_chosen_itself(
    rows: Rows, connection: psycopg.Connection, tables: Tables
) -> None:
    orphan = rows.parked(behind=10_000)

    assert [row.id for row in list_parked(tables, replace(EVERYTHING, limit=9), with_held=False)[0]] == [orphan]
    assert retry(connection, "outbox", ParkedSelection(ids=[orphan])).chosen == 1


def test_a_held_row_is_not_chosen_by_name_nor_by_filter(rows: Rows, connection: psycopg.Connection) -> None:
    head = rows.parked(event_type="A")
    follower = rows.parked(behind=head, event_type="B")

    by_name = retry(connection, "outbox", ParkedSelection(ids=[follower, 10_000]))
    by_filter = retry(connection, "outbox", ParkedSelection(event_type="B"))

    assert by_name.chosen == by_filter.chosen == 0
    assert sorted(by_name.not_found) == [
        f"10000 is not parked: {WhyMissing.UNKNOWN}",
        f"{follower} is held behind {head}: choose that one",
    ]
    assert rows.states()[follower] == ("parked", head)


@pytest.mark.parametrize(
    "selection",
    [
        ParkedSelection(aggregate_type="order"),
        ParkedSelection(aggregate_id="2"),
        ParkedSelection(event_type="Paid"),
        ParkedSelection(reason="TOO large"),
        ParkedSelection(limit=1),
    ],
    ids=str,
)
def test_each_filter_selects(
    selection: ParkedSelection, rows: Rows, connection: psycopg.Connection, tables: Tables
) -> None:
    wanted = rows.parked("2", aggregate_type="order", event_type="Paid")
    rows.connection.execute("UPDATE outbox.message SET last_error = 'refused: too large'")
    rows.parked("1")

    listed, total = list_parked(tables, replace(selection, limit=selection.limit or 9), with_held=True)
    foreseen = preview(connection, "outbox", selection)
    done = retry(connection, "outbox", selection)

    assert [row.id for row in listed] == [wanted]
    assert total == (2 if selection.limit else 1)
    assert foreseen == done == ParkedDone(1, 0, [])
    assert rows.states()[wanted] == PENDING


def test_a_message_id_selects(rows: Rows, connection: psycopg.Connection) -> None:
    message_id, missing = uuid4(), uuid4()
    row = rows.parked(message_id=message_id)
    rows.parked("2")

    done = retry(connection, "outbox", ParkedSelection(message_ids=[message_id, missing]))

    assert done == ParkedDone(1, 0, [f"{missing} is not parked: {WhyMissing.UNKNOWN}"])
    assert show_error(connection, row) == f"{row} is not parked: it is pending"


def show_error(connection: psycopg.Connection, row: int) -> str:
    with pytest.raises(NotFoundError) as refused:
        show_parked(Tables(connection, "outbox"), row, length=10)
    return str(refused.value)


def test_the_list_tells_heads_and_how_many_wait_behind(rows: Rows, tables: Tables) -> None:
    head = rows.parked()
    held = [rows.parked(behind=head) for _ in range(3)]

    heads, heads_total = list_parked(tables, replace(EVERYTHING, limit=2), with_held=False)
    all_rows, total = list_parked(tables, replace(EVERYTHING, limit=2), with_held=True)

    assert [(row.id, row.held, row.attempts) for row in heads] == [(head, 3, 8)]
    assert [row.id for row in all_rows] == [head, held[0]]
    assert (heads_total, total) == (1, 4)


def test_a_payload_is_cut_where_asked(rows: Rows, tables: Tables) -> None:
    row = rows.parked(payload=None, payload_bytes=b"\x00\xff" * 10)

    shown = show_parked(tables, row, length=3)

    assert (shown.payload, shown.payload_bytes, shown.payload_size) == (None, b"\x00\xff\x00", 20)


@pytest.mark.parametrize(
    "bomb",
    [
        f'{{"n": [{", ".join(["1e131000"] * 9000)}]}}',
        f'{{"n": [{", ".join(["1." + "0" * 16383] * 9000)}]}}',
        f'{{"n": {"[" * 13_000}{"]" * 13_000}}}',
    ],
    ids=["a gigabyte as text", "150 MB of zeros", "deeper than the stack"],
)
def test_a_row_whose_headers_cannot_be_shown_is_shown_without_them(rows: Rows, tables: Tables, bomb: str) -> None:
    row = rows.parked(headers=Jsonb({"few": 1}))
    rows.connection.execute("UPDATE outbox.message SET headers = %s::jsonb WHERE id = %s", [bomb, row])

    shown = show_parked(tables, row, length=20)

    assert (shown.headers, shown.last_error) == (None, "returned: no queue is bound")
    assert (shown.headers_size or 0) > 100_000
