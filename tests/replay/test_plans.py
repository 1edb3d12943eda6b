"""A replay reads the days that its time range needs, and the rows by their place."""

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from relay.replay.job import make_job
from relay.replay.selection import Selection, count_statement
from relay.replay.session import places_statement, read_statements
from tests.support.days import make_days
from tests.support.log import use_log
from tests.support.plans import explain, nodes, scans, tables, tables_beside_log

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
    job = make_job(connection, "outbox", Selection(since=first, until=end, aggregate_id="7"))

    listed = tables_beside_log(explain(connection, places_statement("outbox", job, 0)))
    counted = tables_beside_log(explain(connection, count_statement("outbox", job.selection, job.made_at)))

    assert listed == counted == {partition(today - timedelta(days=ago)) for ago in days}


def test_rows_are_read_by_their_place(connection: psycopg.Connection, today: datetime) -> None:
    job = make_job(connection, "outbox", Selection())
    first = today - timedelta(days=5)
    values = {"first": first, "next": first + timedelta(days=1), "places": '{"(0,1)","(0,3)"}'}

    plan = explain(connection, read_statements("outbox", job)[0], values)

    assert {node["Node Type"] for node in nodes(plan)} == {"Tid Scan"}
    assert tables(plan) == {partition(first)}
    assert plan["Actual Rows"] == 2


def test_rows_of_the_log_are_read_by_lane_and_id(connection: psycopg.Connection) -> None:
    use_log(connection, ids=1 << 24)
    connection.execute(
        "INSERT INTO outbox.message (aggregate_type, event_type, payload)"
        " SELECT 'a', 'e', '1' FROM generate_series(1, 20000)"
    )
    wanted = connection.execute("SELECT lane, id FROM outbox.message_log ORDER BY id LIMIT 100").fetchall()
    values = {"lanes": [lane for lane, _ in wanted], "ids": [id_ for _, id_ in wanted]}

    plan = explain(connection, read_statements("outbox", make_job(connection, "outbox", Selection()))[1], values)

    assert plan["Actual Rows"] == 100
    assert {scan["Node Type"] for scan in scans(plan)} == {"Index Scan"}


def partition(day: datetime) -> str:
    return f"message_sent_{day:%Y%m%d}"
