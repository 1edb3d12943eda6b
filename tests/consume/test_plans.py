"""However much is held or remembered, nobody reads all of it."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.sql import Composed

from relay.config.settings import DatabaseSettings
from relay.consume import Inbox
from relay.consume.apply.fence import NO_PARTITION
from relay.consume.failed.held_table import CLAIM, CLAIM_FOR, NEXT_DUE, NOT_HELD, PROMOTE, PROMOTE_ALL, TAKEN
from relay.consume.message import NO_DAY
from relay.consume.worker import KNOWN
from tests.consume.effects import CONSUMER
from tests.support.plans import explain, scans

pytestmark = pytest.mark.every_postgres

HELD = """
    INSERT INTO outbox.held_message (
        consumer_name, key, message_id, event_type, exchange, routing_key, envelope, body, attempts, due_at
    )
    SELECT %s, 'key-' || number %% 1000, gen_random_uuid(), 'e', '', '', '', '', 0,
        CASE WHEN number < 1000 THEN now() + number * interval '1 s' ELSE 'infinity' END
    FROM generate_series(0, 49999) AS number
"""


@pytest.fixture(params=["no statistics", "statistics of an empty table", "statistics"])
def connection(request: pytest.FixtureRequest, database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox.held_message SET (autovacuum_enabled = off)")
        if request.param == "statistics of an empty table":
            connection.execute("ANALYZE outbox.held_message")
        connection.execute(HELD, [CONSUMER])
        if request.param == "statistics":
            connection.execute("ANALYZE outbox.held_message")
        yield connection


def test_what_is_held_is_found_by_an_index(connection: psycopg.Connection) -> None:
    inbox = Inbox(DatabaseSettings(), CONSUMER)
    today = datetime.now(UTC).date()  # a day that has its partition
    held = [row for (row,) in connection.execute("SELECT message_id FROM outbox.held_message LIMIT 1")]
    arrived = {
        "consumer": CONSUMER,
        "message_ids": [uuid4() for _ in range(100)],
        "days": [today] * 100,
        "business_keys": ["7"] * 100,
        "keys": [f"key-{number}" for number in range(950, 1050)],
        "plain_ids": None,
    }
    head = {**arrived, "message_ids": held, "days": [today], "business_keys": ["7"], "keys": ["key-0"]}
    ours = {"consumer": CONSUMER, "partition": NO_PARTITION}
    statements: dict[str, tuple[Composed, dict[str, Any]]] = {
        "arrived": (NOT_HELD.statement(inbox), arrived),
        "taken": (TAKEN.statement(inbox), head),
        "claim": (inbox.statement(CLAIM), {**ours, "claim": CLAIM_FOR}),
        "next due": (inbox.statement(NEXT_DUE), ours),
        "promote": (inbox.statement(PROMOTE), {"consumer": CONSUMER, "keys": ["key-7"]}),
        "promote all": (inbox.statement(PROMOTE_ALL), {"consumer": CONSUMER}),
    }

    read = {name: rows_read(connection, *statement) for name, statement in statements.items()}

    assert read["arrived"] <= 2 * 100
    assert read["taken"] <= 4
    assert read["claim"] <= 4
    assert read["next due"] <= 1
    assert read["promote"] <= 4
    assert read["promote all"] <= 4 * 1000


REMEMBERED = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)
    SELECT %s, gen_random_uuid(), '1970-01-01' FROM generate_series(1, 20000)
"""


def test_repeats_are_found_by_an_index(connection: psycopg.Connection) -> None:
    inbox = Inbox(DatabaseSettings(), CONSUMER)
    connection.execute("ANALYZE outbox.processed_message")  # empty
    connection.execute(REMEMBERED, [CONSUMER])
    known = [row for (row,) in connection.execute("SELECT message_id FROM outbox.processed_message LIMIT 100")]
    arrived = {"consumer": CONSUMER, "message_ids": [*known, uuid4()], "days": [NO_DAY] * 101}

    assert 0 < rows_read(connection, inbox.statement(KNOWN), arrived, table="processed_message_undated") <= 200


def test_what_was_applied_before_the_scope_was_by_writer_is_found_by_an_index(connection: psycopg.Connection) -> None:
    inbox = Inbox(DatabaseSettings(), CONSUMER, scope="writer")
    connection.execute("ANALYZE outbox.processed_message")  # empty
    connection.execute(REMEMBERED, [CONSUMER])
    known = [row for (row,) in connection.execute("SELECT message_id FROM outbox.processed_message LIMIT 100")]
    arrived = {
        "consumer": CONSUMER,
        "message_ids": [uuid4() for _ in known],
        "days": [NO_DAY] * 100,
        "business_keys": ["7"] * 100,
        "keys": ["key"] * 100,
        "plain_ids": known,
    }

    assert 0 < rows_read(connection, NOT_HELD.statement(inbox), arrived, table="processed_message_undated") <= 200


def rows_read(
    connection: psycopg.Connection, statement: Composed, values: dict[str, Any], table: str = "held_message"
) -> float:
    """Return the number of rows read from a table, with those that were then filtered away."""
    read = [node for node in scans(explain(connection, statement, values)) if node["Relation Name"] == table]
    each = (
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in read
        if "Scan" in node["Node Type"]
    )
    return float(sum(each))
