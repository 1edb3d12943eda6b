"""`outbox.message`: what a plain INSERT gets, what is refused, and the lane."""

from collections import Counter
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql

from tests.migrations.conftest import Connection

pytestmark = pytest.mark.every_postgres

MINIMAL: dict[str, object] = {"aggregate_type": "Invoice", "event_type": "InvoiceIssued", "payload": '{"a": 1}'}
MARK = "UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE state = 'pending'"


def insert(connection: Connection, **values: object) -> None:
    row = {**MINIMAL, **values}
    statement = sql.SQL("INSERT INTO outbox.message ({}) VALUES ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, row)), sql.SQL(", ").join(sql.Placeholder() * len(row))
    )
    connection.execute(statement, list(row.values()))


def value(connection: Connection, question: LiteralString) -> object:
    row = connection.execute(question).fetchone()
    assert row is not None
    return row[0]


def test_the_shortest_insert_is_a_complete_pending_row(connection: Connection) -> None:
    insert(connection)

    row = connection.execute(
        "SELECT state, attempts, id > 0, message_id IS NOT NULL, created_at <= now(), lane BETWEEN 0 AND 15,"
        " num_nonnulls(aggregate_id, exchange, routing_key, headers, content_type, payload_bytes, available_at,"
        " last_error, held_behind, parked_at, sent_at, writer, batch_id, trace_context)"
        " FROM outbox.message_pending"
    ).fetchone()

    assert row == ("pending", 0, True, True, True, True, 0)


REFUSED: list[tuple[str | None, dict[str, object]]] = [
    ("message_one_payload", {"payload_bytes": b"x"}),
    ("message_one_payload", {"payload": None}),
    ("message_aggregate_type", {"aggregate_type": ""}),
    ("message_aggregate_type", {"aggregate_type": "ä" * 128}),
    ("message_aggregate_id", {"aggregate_id": ""}),
    ("message_aggregate_id", {"aggregate_id": "ä" * 128}),
    ("message_event_type", {"event_type": ""}),
    ("message_event_type", {"event_type": "ä" * 128}),
    ("message_exchange", {"exchange": "x" * 256}),
    ("message_routing_key", {"routing_key": "x" * 256}),
    ("message_content_type", {"content_type": "x" * 256}),
    ("message_headers", {"headers": "[1]"}),
    ("message_headers", {"headers": "null"}),
    (None, {"state": "unheard-of"}),  # no partition takes it
]


def test_a_row_that_could_never_be_sent_is_refused(connection: Connection) -> None:
    seen = []

    for _, values in REFUSED:
        with pytest.raises(psycopg.errors.CheckViolation) as refusal:
            insert(connection, **values)
        seen.append(refusal.value.diag.constraint_name)

    assert seen == [constraint for constraint, _ in REFUSED]


def test_what_every_row_has_cannot_be_null(connection: Connection) -> None:
    for column in ("aggregate_type", "event_type", "message_id", "created_at", "attempts"):
        with pytest.raises(psycopg.errors.NotNullViolation) as refusal:
            insert(connection, **{column: None})

        assert refusal.value.diag.column_name == column


def test_text_that_is_not_json_is_refused(connection: Connection) -> None:
    for text in ("", "{", "{'a': 1}", "NaN", "[1,]", "\ufeff1"):
        with pytest.raises(psycopg.errors.InvalidTextRepresentation):
            insert(connection, payload=text)


def test_the_longest_and_the_emptiest_that_amqp_has_are_taken(connection: Connection) -> None:
    insert(connection, aggregate_type="ä" * 127, aggregate_id="x" * 255, event_type="x" * 255)
    insert(connection, exchange="", routing_key="")

    assert value(connection, "SELECT count(*) FROM outbox.message_pending") == 2


def test_a_key_keeps_its_lane(connection: Connection) -> None:
    for key in range(200):
        for _ in range(2):
            insert(connection, aggregate_id=f"invoice-{key}")

    lanes = connection.execute("SELECT aggregate_id, count(DISTINCT lane) FROM outbox.message GROUP BY 1").fetchall()

    assert len(lanes) == 200
    assert {count for _, count in lanes} == {1}
    assert value(connection, "SELECT count(DISTINCT lane) FROM outbox.message") == 16


def test_rows_without_a_key_spread_evenly(connection: Connection) -> None:
    for _ in range(160):
        insert(connection)

    assert Counter(lane for (lane,) in connection.execute("SELECT lane FROM outbox.message")) == dict.fromkeys(
        range(16), 10
    )


def test_a_lane_cannot_be_chosen(connection: Connection) -> None:
    with pytest.raises(psycopg.errors.GeneratedAlways):
        insert(connection, lane=3)


@pytest.mark.parametrize("key", [None, "invoice-7"])
def test_a_row_that_moves_keeps_all_but_its_state(connection: Connection, key: str | None) -> None:
    for payload in ('{"big": 123456789012345678901234567890, "spaced" : "\\u00e4\\\\"}', None):
        insert(connection, aggregate_id=key, payload=payload, payload_bytes=None if payload else b"\0\\\xff")
    columns = "id, message_id, lane, aggregate_id, payload::text, payload_bytes, created_at"
    before = connection.execute(f"SELECT {columns} FROM outbox.message ORDER BY id").fetchall()

    moves = [
        "UPDATE outbox.message SET state = 'parked', parked_at = now(), last_error = 'x'",
        "UPDATE outbox.message SET state = 'pending', parked_at = NULL, last_error = NULL",
        MARK,
    ]
    for move in moves:
        connection.execute(move)

        assert connection.execute(f"SELECT {columns} FROM outbox.message ORDER BY id").fetchall() == before
    assert value(connection, "SELECT count(*) FROM outbox.message_sent") == 2


def test_a_sent_row_needs_its_time(connection: Connection) -> None:
    insert(connection)

    with pytest.raises(psycopg.errors.CheckViolation, match="no partition"):
        connection.execute("UPDATE outbox.message SET state = 'sent'")


def test_the_pending_partition_is_vacuumed_by_count_not_by_share(connection: Connection) -> None:
    options = value(connection, "SELECT reloptions FROM pg_class WHERE oid = 'outbox.message_pending'::regclass")

    assert isinstance(options, list)
    assert {"autovacuum_vacuum_scale_factor=0", "autovacuum_vacuum_threshold=5000"} <= set(options)
