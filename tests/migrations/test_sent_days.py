"""`ensure_sent_days`: a partition for each day of sent rows, ahead of time, by any number of relays at once."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta

import psycopg
import pytest

from relay.testing.servers.process import wait_for
from tests.migrations.conftest import Connection

pytestmark = pytest.mark.every_postgres

TODAY = datetime.now(UTC).date()
FIRST, SECOND, THIRD, FOURTH = (TODAY + timedelta(days=ahead) for ahead in (3, 4, 5, 6))  # not there yet
BOUNDS = """
    SELECT inhrelid::regclass::text, pg_get_expr(relpartbound, oid)
    FROM pg_inherits JOIN pg_class ON oid = inhrelid
    WHERE inhparent = 'outbox.message_sent'::regclass
    ORDER BY 1
"""
INSERT = "INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')"


def days(connection: Connection) -> list[str]:
    return [str(name).removeprefix("outbox.message_sent_") for name, _ in connection.execute(BOUNDS)]


def ensure(connection: Connection, first: date, count: int) -> object:
    row = connection.execute("SELECT outbox.ensure_sent_days(%s::date, %s)", [first, count]).fetchone()
    assert row is not None
    return row[0]


def test_a_migrated_database_has_today_and_two_more_days(connection: Connection) -> None:
    today = "SELECT to_char((now() AT TIME ZONE 'UTC')::date + n, 'YYYYMMDD') FROM generate_series(0, 2) AS n"

    # The template is as old as the test run, which may have begun yesterday.
    assert {day for (day,) in connection.execute(today)} & set(days(connection))
    assert len(days(connection)) == 3


def test_missing_days_are_made_and_counted(connection: Connection) -> None:
    before = days(connection)

    assert ensure(connection, FIRST, 3) == 3

    assert days(connection) == [*before, *(f"{day:%Y%m%d}" for day in (FIRST, SECOND, THIRD))]


def test_days_that_exist_are_left_as_they_are(connection: Connection) -> None:
    ensure(connection, SECOND, 1)
    before = connection.execute(BOUNDS).fetchall()

    assert ensure(connection, SECOND, 1) == 0
    assert connection.execute(BOUNDS).fetchall() == before
    assert ensure(connection, FIRST, 3) == 2


@pytest.mark.parametrize(
    ("time_zone", "date_style"), [("Pacific/Kiritimati", "SQL, DMY"), ("America/New_York", "German")]
)
def test_a_day_begins_and_ends_by_utc(connection: Connection, time_zone: str, date_style: str) -> None:
    settings = "SELECT set_config('TimeZone', %s, false), set_config('DateStyle', %s, false)"
    connection.execute(settings, [time_zone, date_style])
    ensure(connection, FIRST, 1)

    connection.execute("SET TimeZone = 'UTC'; SET DateStyle = 'ISO, MDY'")
    bounds = connection.execute(BOUNDS).fetchall()

    expected = f"FOR VALUES FROM ('{FIRST} 00:00:00+00') TO ('{SECOND} 00:00:00+00')"
    assert (f"outbox.message_sent_{FIRST:%Y%m%d}", expected) in bounds


def test_calls_at_the_same_time_make_each_day_once(connection: Connection, other_connection: Connection) -> None:
    with ThreadPoolExecutor(1) as thread:
        with connection.transaction():
            first = ensure(connection, FIRST, 2)
            second = thread.submit(ensure, other_connection, FIRST, 3)
            waiting = "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted"
            pid = other_connection.info.backend_pid
            wait_for(lambda: connection.execute(waiting, [pid]).fetchone() == (1,), "the second call waits", 20)

        assert (first, second.result(timeout=20)) == (2, 1)


def test_rows_are_marked_while_a_day_is_made(connection: Connection, other_connection: Connection) -> None:
    connection.execute(INSERT)
    connection.execute("SET lock_timeout = '5s'")

    with other_connection.transaction():
        ensure(other_connection, FIRST, 1)
        connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE state = 'pending'")

    assert connection.execute("SELECT count(*) FROM outbox.message_sent").fetchone() == (1,)


def test_a_day_is_made_while_a_reader_holds_all_of_them(connection: Connection, other_connection: Connection) -> None:
    connection.execute("SET lock_timeout = '5s'")

    with other_connection.transaction():
        other_connection.execute("SELECT count(*) FROM outbox.message")
        assert ensure(connection, FIRST, 1) == 1


def test_a_row_without_a_day_is_refused_and_stays_pending(connection: Connection) -> None:
    connection.execute(INSERT)

    with pytest.raises(psycopg.errors.CheckViolation, match="no partition of relation"):
        connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = '2031-01-01'")

    assert connection.execute("SELECT count(*) FROM outbox.message_pending").fetchone() == (1,)


def test_a_table_that_only_has_the_name_of_a_day_is_no_day(connection: Connection) -> None:
    connection.execute(f"CREATE TABLE outbox.message_sent_{FIRST:%Y%m%d} ()".encode())

    with pytest.raises(psycopg.errors.DuplicateTable):
        ensure(connection, FIRST, 1)


def test_every_partition_has_the_columns_storage_and_checks_of_the_table(connection: Connection) -> None:
    ensure(connection, FIRST, 1)
    columns = "SELECT attname, attgenerated, attstorage FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
    checks = "SELECT conname FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'c' ORDER BY 1"

    for question in (columns, checks):
        expected = connection.execute(question, ["outbox.message"]).fetchall()
        assert expected
        for partition in ("pending", "parked", "discarded", f"sent_{FIRST:%Y%m%d}"):
            assert connection.execute(question, [f"outbox.message_{partition}"]).fetchall() == expected


@pytest.mark.parametrize(("ahead", "count"), [(-2, 1), (9, 1), (0, 10), (0, 2_000_000_000), (0, 0), (0, None)])
def test_days_that_no_mark_needs_are_not_made(connection: Connection, ahead: int, count: int | None) -> None:
    before = days(connection)

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="days of sent rows are made from"):
        connection.execute("SELECT outbox.ensure_sent_days(%s::date, %s)", [TODAY + timedelta(days=ahead), count])

    assert days(connection) == before


def test_an_advisory_lock_of_any_login_keeps_no_day_from_being_made(
    connection: Connection, other_connection: Connection
) -> None:
    connection.execute("SET lock_timeout = '5s'")
    other_connection.execute("SELECT pg_advisory_lock(hashtextextended('outbox.ensure_sent_days', 0))")

    assert ensure(connection, FIRST, 1) == 1
