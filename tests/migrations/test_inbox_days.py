"""The inbox by days of its messages: made ahead or on demand, never again once forgotten; and its way from 0005."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from relay.testing.servers.process import wait_for
from tests.migrations.conftest import Connection

pytestmark = pytest.mark.every_postgres

BOUNDS = """
    SELECT inhrelid::regclass::text, pg_get_expr(relpartbound, oid)
    FROM pg_inherits JOIN pg_class ON oid = inhrelid
    WHERE inhparent = 'outbox.processed_message'::regclass
    ORDER BY 1
"""
APPLY = "INSERT INTO outbox.processed_message (consumer_name, message_id, message_day) VALUES ('c', %s, %s)"
FORGET = "UPDATE outbox.inbox_memory SET since = %s"
# There is a partition of it, on whichever side of midnight the database was migrated.
TOMORROW = datetime.now(UTC).date() + timedelta(days=1)
FIRST, SECOND, THIRD = (TOMORROW + timedelta(days=ahead) for ahead in (2, 3, 4))  # not there yet
PAST, LATER, LATEST = (TOMORROW - timedelta(days=ago) for ago in (62, 61, 60))


def days(connection: Connection) -> list[str]:
    return [str(name).removeprefix("outbox.processed_message_") for name, _ in connection.execute(BOUNDS)]


def ensure(connection: Connection, first: date, count: int) -> object:
    row = connection.execute("SELECT outbox.ensure_inbox_days(%s::date, %s)", [first, count]).fetchone()
    assert row is not None
    return row[0]


def test_a_migrated_database_has_days_to_come_and_a_place_for_messages_without_one(connection: Connection) -> None:
    assert len(days(connection)) == 4
    assert f"{TOMORROW:%Y%m%d}" in days(connection)

    connection.execute(APPLY, [uuid4(), "1970-01-01"])
    connection.execute(APPLY, [uuid4(), TOMORROW])

    assert connection.execute("SELECT count(*) FROM outbox.processed_message_undated").fetchone() == (1,)


def test_missing_days_are_made_and_counted(connection: Connection) -> None:
    before = days(connection)
    connection.execute("SET DateStyle = 'German'; SET TimeZone = 'Pacific/Kiritimati'")

    assert ensure(connection, FIRST, 3) == 3
    assert ensure(connection, SECOND, 2) == 0

    connection.execute("SET DateStyle = 'ISO'")
    assert days(connection) == sorted([*before, *(f"{day:%Y%m%d}" for day in (FIRST, SECOND, THIRD))])
    assert (f"outbox.processed_message_{SECOND:%Y%m%d}", f"FOR VALUES FROM ('{SECOND}') TO ('{THIRD}')") in (
        connection.execute(BOUNDS).fetchall()
    )


def test_calls_at_the_same_time_make_each_day_once(connection: Connection, other_connection: Connection) -> None:
    waiting = "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted"
    with ThreadPoolExecutor(1) as thread:
        with connection.transaction():
            first = ensure(connection, FIRST, 2)
            second = thread.submit(ensure, other_connection, FIRST, 3)
            pid = other_connection.info.backend_pid
            wait_for(lambda: connection.execute(waiting, [pid]).fetchone() == (1,), "the second call waits", 20)

        assert (first, second.result(timeout=20)) == (2, 1)


def test_messages_are_applied_while_a_day_is_made(connection: Connection, other_connection: Connection) -> None:
    connection.execute("SET lock_timeout = '5s'")

    with other_connection.transaction():
        ensure(other_connection, FIRST, 1)
        connection.execute(APPLY, [uuid4(), TOMORROW])


def test_a_message_is_known_by_its_consumer_id_and_day(connection: Connection) -> None:
    message_id = uuid4()
    connection.execute(APPLY, [message_id, TOMORROW])

    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute(APPLY, [message_id, TOMORROW])


def test_a_forgotten_day_is_not_made_again_and_an_existing_one_takes_messages(
    connection: Connection,
) -> None:
    ensure(connection, PAST, 1)
    connection.execute(FORGET, [LATEST])

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as refused:
        ensure(connection, LATER, 1)

    assert refused.value.diag.message_detail == str(LATEST)
    assert ensure(connection, LATEST, 1) == 1
    assert ensure(connection, PAST, 1) == 0
    connection.execute(APPLY, [uuid4(), PAST])


def test_a_day_that_is_being_detached_is_not_there_any_more(
    connection: Connection, other_connection: Connection
) -> None:
    ensure(connection, PAST, 1)
    with other_connection.transaction():
        other_connection.execute("SELECT count(*) FROM outbox.processed_message")
        connection.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute(
                "ALTER TABLE outbox.processed_message DETACH PARTITION"
                f" outbox.processed_message_{PAST:%Y%m%d} CONCURRENTLY".encode()
            )
    connection.execute(FORGET, [LATER])

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        ensure(connection, PAST, 1)


def test_who_looks_with_an_old_snapshot_makes_no_forgotten_day(
    connection: Connection, other_connection: Connection
) -> None:
    with other_connection.transaction():
        other_connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other_connection.execute("SELECT count(*) FROM outbox.inbox_memory")
        connection.execute(FORGET, [LATER])

        with pytest.raises(psycopg.errors.SerializationFailure), other_connection.transaction():
            ensure(other_connection, PAST, 1)


@pytest.mark.parametrize(("first", "count"), [(8, 1), (1, 2_000_000_000), (-500, 1), (-500, 2000)])
def test_days_that_no_clock_and_no_memory_explains_are_not_made(connection: Connection, first: int, count: int) -> None:
    before = days(connection)

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="the inbox has no day"):
        ensure(connection, TOMORROW + timedelta(days=first), count)

    assert days(connection) == before


def test_a_day_that_cannot_be_made_names_who_locks_it(connection: Connection, other_connection: Connection) -> None:
    with other_connection.transaction():
        other_connection.execute("SELECT FROM outbox.inbox_memory FOR UPDATE")

        with pytest.raises(psycopg.errors.LockNotAvailable) as refused:
            ensure(connection, FIRST, 1)

    assert f"session {other_connection.info.backend_pid}" in str(refused.value)


OLD_APPLY = "INSERT INTO outbox.processed_message (consumer_name, message_id, processed_at, business_key)"
WRITE = """
    INSERT INTO outbox.message (message_id, aggregate_type, event_type, payload, created_at)
    VALUES (%s, 'a', 'e', '1', %s)
"""
READ = "SELECT message_id, message_day, processed_at, business_key FROM outbox.processed_message ORDER BY business_key"


def test_rows_move_to_the_day_of_their_message_and_back(database: DatabaseSettings, connection: Connection) -> None:
    downgrade(database, "0005")
    written, unknown, ancient = uuid4(), uuid4(), uuid4()
    applied = datetime(2025, 3, 9, 0, 30, tzinfo=UTC)
    connection.execute(WRITE, [written, datetime(2025, 3, 7, 23, 59, tzinfo=UTC)])
    connection.execute(WRITE, [ancient, datetime(1960, 1, 1, tzinfo=UTC)])
    for key, message_id in (("a", written), ("b", unknown), ("c", ancient)):
        connection.execute(f"{OLD_APPLY} VALUES ('c', %s, %s, %s)", [message_id, applied, key])

    migrate(database)
    moved = connection.execute(READ).fetchall()
    kept = "SELECT array_agg(message_id ORDER BY business_key) FROM outbox.processed_message"
    downgrade(database, "0005")

    assert moved == [
        (written, date(2025, 3, 7), applied, "a"),
        (unknown, date(2025, 3, 9), applied, "b"),
        (ancient, date(1970, 1, 1), applied, "c"),
    ]
    assert connection.execute(kept).fetchone() == ([written, unknown, ancient],)
    assert days(connection) == []


def test_a_message_with_rows_of_several_days_is_one_row_after_a_downgrade(
    database: DatabaseSettings, connection: Connection
) -> None:
    message_id: UUID = uuid4()
    connection.execute(APPLY, [message_id, TOMORROW])
    connection.execute(APPLY, [message_id, "1970-01-01"])

    downgrade(database, "0005")

    assert connection.execute("SELECT message_id FROM outbox.processed_message").fetchall() == [(message_id,)]
