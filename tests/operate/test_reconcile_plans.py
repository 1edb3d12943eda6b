"""A reconciliation reads the days that it needs, and looks into an inbox by its primary key."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Composed

from relay.operate.reconcile.inbox import APPLIED, CONSUMERS
from relay.operate.reconcile.interval import Interval
from relay.operate.reconcile.table import rows_statement
from relay.operate.sent.selection import SentSelection
from relay.operate.status import BY_INDEX
from tests.support.days import make_days
from tests.support.plans import Plan, explain, scans, tables

pytestmark = pytest.mark.every_postgres

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
NOT_SENT = {"message_pending", "message_parked", "message_quarantined", "message_discarded", "message_archived"}
MESSAGES = 20_000  # of each of three consumers
DAYS = 10  # to which they belong
INBOX_DAYS = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox.processed_message'::regclass"


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(params=["no statistics", "statistics of an empty table", "statistics"])
def inbox(request: pytest.FixtureRequest, connection: psycopg.Connection) -> psycopg.Connection:
    connection.execute("SELECT outbox.ensure_inbox_days(%s::date, %s)", [TODAY - timedelta(days=DAYS - 1), DAYS])
    for (day,) in connection.execute(INBOX_DAYS).fetchall():
        connection.execute(f"ALTER TABLE {day} SET (autovacuum_enabled = off)")
    if request.param == "statistics of an empty table":
        connection.execute("ANALYZE outbox.processed_message")
    connection.execute(
        "INSERT INTO outbox.processed_message (consumer_name, message_id, message_day)"
        " SELECT name, gen_random_uuid(), %s::date - n %% %s"
        " FROM generate_series(1, %s) AS n, unnest(ARRAY['a', 'b', 'c']) AS name",
        [TODAY, DAYS, MESSAGES],
    )
    if request.param == "statistics":
        connection.execute("VACUUM ANALYZE outbox.processed_message")
    return connection


def test_only_the_days_near_the_time_range_are_read(connection: psycopg.Connection) -> None:
    connection.execute(make_days("%s", "30"), [TODAY - timedelta(days=30)])
    since = TODAY - timedelta(days=5) + timedelta(hours=2)
    interval = Interval(since, since + timedelta(hours=1), TODAY, timedelta(minutes=1))

    plan = explain(connection, rows_statement("outbox", interval, SentSelection(aggregate_id="7")))

    assert tables(plan) == {f"message_sent_{since:%Y%m%d}", *NOT_SENT}


def test_the_consumers_are_found_without_reading_the_inbox(inbox: psycopg.Connection) -> None:
    plan = explain_by_index(inbox, CONSUMERS.format(schema=SQL("outbox")))

    assert read(plan) <= 2 * 3 * DAYS  # from each day one, for each
    assert plan["Actual Rows"] == 3


def test_messages_are_looked_up_by_the_primary_key(inbox: psycopg.Connection) -> None:
    asked = inbox.execute("SELECT consumer_name, message_id FROM outbox.processed_message LIMIT 1000").fetchall()
    values = {"consumers": [name for name, _ in asked], "message_ids": [message_id for _, message_id in asked]}

    plan = explain_by_index(inbox, APPLIED.format(schema=SQL("outbox")), values)

    assert plan["Actual Rows"] == 1000
    assert read(plan) == 1000
    assert all(node["Index Name"].endswith("_pkey") for node in scans(plan))


def explain_by_index(connection: psycopg.Connection, statement: Composed, values: Any = None) -> Plan:
    with connection.transaction(force_rollback=True):
        connection.execute(BY_INDEX)
        return explain(connection, statement, values)


def read(plan: Plan) -> int:
    """Return the number of rows that were read from tables."""
    return int(sum(node["Actual Rows"] * node["Actual Loops"] for node in scans(plan)))
