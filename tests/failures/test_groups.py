"""Failures are grouped by their cause, and many parked rows by an index."""

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.failures.cause import FailureKind
from relay.operate.failures.groups import (
    groups_statement,
    list_groups,
    list_held_groups,
    read_parked_group,
)
from relay.operate.migrate import downgrade, migrate
from relay.operate.parked import Selection, composed, list_parked
from relay.operate.release import READ_HEADS, retry
from tests.operate.rows import Rows
from tests.support.plans import explain, scans, tables

MANY = 20_000
PARK_MANY = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, parked_at, last_error)
    SELECT 'invoice', n::text, 'InvoiceIssued', to_json(repeat('x', 500)), 'parked', now(),
        'row ' || n || CASE WHEN n % 100 = 0 THEN ' is too large' ELSE ' was returned' END
    FROM generate_series(1, %s) AS n
"""
HOLD = """
    INSERT INTO outbox.held_message (consumer_name, key, message_id, event_type, exchange, routing_key, envelope, body,
        attempts, first_failed_at, last_failed_at, due_at, exception, error)
    VALUES ('billing', %(key)s, gen_random_uuid(), 'InvoiceIssued', '', 'q', '', '', %(attempts)s,
        CASE WHEN %(error)s::text IS NOT NULL THEN now() END, CASE WHEN %(error)s::text IS NOT NULL THEN now() END,
        now(), 'ValueError', %(error)s)
"""


def test_rows_that_differ_in_numbers_are_one_group(rows: Rows, connection: psycopg.Connection) -> None:
    first = rows.parked("1")
    rows.parked("1", behind=first)
    rows.parked("2")
    rows.connection.execute("UPDATE outbox.message SET last_error = 'row ' || id || ' is too large'")
    rows.parked("3", exchange="billing")

    large, returned = list_groups(connection, "outbox")

    assert (large.kind, large.cause, large.event_type, large.place) == (
        FailureKind.PARKED, "row # is too large", "InvoiceIssued", None,
    )  # fmt: skip
    assert (large.count, large.keys_held, large.rows_held, large.retried, large.example) == (2, 1, 1, 0, str(first))
    assert large.first_at is not None
    assert large.last_at is not None
    assert large.first_at <= large.last_at
    assert (returned.cause, returned.place, returned.count) == ("returned: no queue is bound", "billing", 1)
    assert read_parked_group(connection, "outbox", large.id) == large


def test_a_group_tells_how_often_its_rows_were_retried(rows: Rows, connection: psycopg.Connection) -> None:
    row = rows.parked()
    for _ in range(2):
        retry(connection, "outbox", Selection(ids=[row]))
        rows.connection.execute(
            "UPDATE outbox.message SET state = 'parked', parked_at = now(), last_error = 'returned' WHERE id = %s",
            [row],
        )

    (group,) = list_groups(connection, "outbox")

    assert group.retried == 2


def test_quarantined_routes_are_grouped_by_the_broker_s_words(rows: Rows, connection: psycopg.Connection) -> None:
    rows.quarantined("a")
    rows.quarantined("b")

    (group,) = list_groups(connection, "outbox")

    assert (group.kind, group.cause, group.count) == (FailureKind.QUARANTINED, "312 NO_ROUTE", 2)


def test_held_messages_are_grouped_by_their_exception(rows: Rows, connection: psycopg.Connection) -> None:
    for key, error in (("1", "no invoice 17"), ("1", None), ("2", "no invoice 18")):
        rows.connection.execute(HOLD, {"key": key, "error": error, "attempts": 3})

    (group,) = list_held_groups(connection, "outbox")

    assert (group.cause, group.place, group.count) == ("ValueError: no invoice #", "billing", 2)
    assert (group.keys_held, group.rows_held, group.retried) == (2, 1, 6)


def test_a_list_of_a_group_has_its_rows_alone(rows: Rows, connection: psycopg.Connection) -> None:
    wanted = rows.parked("1")
    rows.parked("2", event_type="InvoicePaid")
    (group,) = [each for each in list_groups(connection, "outbox") if each.event_type == "InvoiceIssued"]

    listed, total = list_parked(connection, "outbox", Selection(group=group.id), with_held=False)

    assert ([row.id for row in listed], total) == ([wanted], 1)


def test_a_migration_groups_what_is_parked(
    rows: Rows, connection: psycopg.Connection, database: DatabaseSettings
) -> None:
    head = rows.parked("1")
    rows.parked("1", behind=head)
    before = list_groups(connection, "outbox")

    downgrade(database, "0014")
    migrate(database)

    assert list_groups(connection, "outbox") == before


@pytest.mark.parametrize("has_statistics", [False, True])
def test_groups_of_many_rows_read_few_rows_of_the_table(
    rows: Rows, connection: psycopg.Connection, has_statistics: bool
) -> None:
    rows.connection.execute("ALTER TABLE outbox.message_parked SET (autovacuum_enabled = off)")
    rows.connection.execute("ALTER TABLE outbox.parked_failure SET (autovacuum_enabled = off)")
    rows.connection.execute(PARK_MANY, [MANY])
    if has_statistics:
        rows.connection.execute("VACUUM ANALYZE outbox.message_parked, outbox.parked_failure")

    plan = explain(connection, groups_statement("outbox"), {"failure": None, "limit": 1000})

    assert "message_parked" in tables(plan)
    assert all(
        scan["Actual Rows"] * scan["Actual Loops"] <= 10
        for scan in scans(plan)
        if scan["Relation Name"] == "message_parked"
    )


@pytest.mark.parametrize("has_statistics", [False, True])
def test_a_batch_of_a_group_reads_about_a_batch(
    rows: Rows, connection: psycopg.Connection, has_statistics: bool
) -> None:
    rows.connection.execute("ALTER TABLE outbox.message_parked SET (autovacuum_enabled = off)")
    rows.connection.execute("ALTER TABLE outbox.parked_failure SET (autovacuum_enabled = off)")
    rows.connection.execute(PARK_MANY, [MANY])
    if has_statistics:
        rows.connection.execute("VACUUM ANALYZE outbox.message_parked, outbox.parked_failure")
    large, small = list_groups(connection, "outbox")

    for group in (large, small):
        selection = Selection(group=group.id)
        values = {
            **dict.fromkeys(Selection.__dataclass_fields__), "group": group.id, "after": 0,
            "until": group.last_at, "batch": 100,
        }  # fmt: skip
        plan = explain(connection, composed("outbox", READ_HEADS, selection), values)

        assert plan["Actual Rows"] == 100
        assert sum(scan["Actual Rows"] * scan["Actual Loops"] for scan in scans(plan)) <= MANY
