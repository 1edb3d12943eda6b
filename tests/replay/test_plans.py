"""A replay reads the days that its time range needs, and the rows by their place."""

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from relay.operate.sent.selection import SentSelection, count_statement
from relay.operate.sent.session import places_statement, read_statement
from relay.operate.sent.work import order_replay
from relay.servers.postgres.tables import Tables
from tests.support.days import make_days
from tests.support.plans import explain, nodes, tables

pytestmark = pytest.mark.every_postgres

DAYS = 30
SECOND = timedelta(seconds=1)


@pytest.fixture
def today() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.fixture
def connection(database_url: str, today: datetime) -> Any:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(make_days("%s", "%s"), [today - timedelta(days=DAYS), DAYS])
        connection.execute(
            "INSERT INTO outbox.message (aggregate_type, event_type, payload, state, sent_at)"
            " SELECT 'a', 'e', '1', 'sent', %s + n * interval '1 hour' FROM generate_series(1, 24 * 29) AS n",
            [today - timedelta(days=DAYS)],
        )
        yield connection


@pytest.mark.parametrize(
    ("since", "until", "days"),  # ago
    [
        (timedelta(days=3), timedelta(days=1), [2, 3]),
        (timedelta(days=3) - SECOND, timedelta(days=1) - SECOND, [1, 2, 3]),
        (timedelta(days=1), None, [0, 1]),
        (None, timedelta(days=29), [30]),
    ],
)
def test_only_the_days_of_the_time_range_are_read(
    connection: psycopg.Connection, today: datetime, since: timedelta | None, until: timedelta | None, days: list[int]
) -> None:
    first, end = (None if ago is None else today - ago for ago in (since, until))
    selection = SentSelection(since=first, until=end, aggregate_id="7")
    job = order_replay(Tables(connection, "outbox"), selection)

    listed = tables(explain(connection, places_statement("outbox", job, 0)))
    counted = tables(explain(connection, count_statement("outbox", selection, job.made_at)))

    assert listed == counted == {partition(today - timedelta(days=ago)) for ago in days}


def test_rows_are_read_by_their_place(connection: psycopg.Connection, today: datetime) -> None:
    job = order_replay(Tables(connection, "outbox"), SentSelection())
    first = today - timedelta(days=5)
    days = {"first": first, "next": first + timedelta(days=1)}
    values = {**days, "places": '{"(0,1)","(0,3)"}', "to_exchange": None, "routing_key": None}

    plan = explain(connection, read_statement("outbox", job), values)

    assert {node["Node Type"] for node in nodes(plan)} == {"Tid Scan"}
    assert tables(plan) == {partition(first)}
    assert plan["Actual Rows"] == 2


def partition(day: datetime) -> str:
    return f"message_sent_{day:%Y%m%d}"
