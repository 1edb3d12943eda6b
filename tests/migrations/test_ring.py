"""The trigger `ring`: it wakes a relay that sleeps, and costs nothing while no relay does."""

import psycopg
import pytest

from tests.migrations.conftest import Connection

pytestmark = pytest.mark.every_postgres

DOORBELL = "hashtextextended('outbox.doorbell', 0)"
INSERT = "INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')"


@pytest.fixture
def relay(connection: Connection) -> Connection:
    connection.execute('LISTEN "outbox.doorbell"')
    return connection


@pytest.fixture
def writer(other_connection: Connection) -> Connection:
    return other_connection


def fall_asleep(relay: Connection) -> None:
    relay.execute(f"SELECT pg_advisory_lock_shared({DOORBELL})")


def rings(relay: Connection, writer: Connection) -> int:
    """Count the rings so far: notifications arrive in the order of the commits, so a last one ends the list."""
    writer.execute("SELECT pg_notify('outbox.doorbell', 'end')")
    payloads: list[str] = []
    while payloads[-1:] != ["end"]:
        got = [notice.payload for notice in relay.notifies(timeout=20, stop_after=1)]
        assert got, "no notification arrived"
        payloads += got
    return payloads.count("")


def test_an_insert_rings_while_a_relay_sleeps(relay: Connection, writer: Connection) -> None:
    fall_asleep(relay)

    writer.execute(INSERT)

    assert rings(relay, writer) == 1


def test_no_insert_rings_while_all_relays_work(relay: Connection, writer: Connection) -> None:
    writer.execute(INSERT)

    assert rings(relay, writer) == 0


def test_a_relay_that_woke_up_is_not_rung_for(relay: Connection, writer: Connection) -> None:
    fall_asleep(relay)
    relay.execute(f"SELECT pg_advisory_unlock_shared({DOORBELL})")

    writer.execute(INSERT)

    assert rings(relay, writer) == 0


def test_one_relay_that_sleeps_among_others_is_rung_for(
    relay: Connection, writer: Connection, database_url: str
) -> None:
    fall_asleep(relay)

    with psycopg.connect(database_url, autocommit=True) as second_relay:
        fall_asleep(second_relay)
    writer.execute(INSERT)

    assert rings(relay, writer) == 1


def test_a_statement_rings_once_however_many_rows_it_has(relay: Connection, writer: Connection) -> None:
    fall_asleep(relay)

    writer.execute(INSERT + ", ('a', 'e', '2'), ('a', 'e', '3')")

    assert rings(relay, writer) == 1


def test_copy_rings(relay: Connection, writer: Connection) -> None:
    fall_asleep(relay)

    with writer.cursor().copy("COPY outbox.message (aggregate_type, event_type, payload) FROM STDIN") as copy:
        copy.write_row(("a", "e", "1"))

    assert rings(relay, writer) == 1


def test_a_transaction_rings_when_it_commits_and_not_when_it_rolls_back(relay: Connection, writer: Connection) -> None:
    fall_asleep(relay)

    with writer.transaction(force_rollback=True):
        writer.execute(INSERT)
    with writer.transaction():
        writer.execute(INSERT)
        writer.execute(INSERT)

    assert rings(relay, writer) == 1


def test_marking_parking_and_making_days_do_not_ring(relay: Connection, writer: Connection) -> None:
    writer.execute(INSERT)
    fall_asleep(relay)

    writer.execute("UPDATE outbox.message SET state = 'parked', parked_at = now()")
    writer.execute("UPDATE outbox.message SET state = 'sent', sent_at = now()")
    writer.execute("SELECT outbox.ensure_sent_days((now() AT TIME ZONE 'UTC')::date + 6, 1)")

    assert rings(relay, writer) == 0


def test_a_writer_keeps_no_lock(relay: Connection, writer: Connection) -> None:
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"

    with writer.transaction():
        writer.execute(INSERT)
        assert relay.execute(held, [writer.info.backend_pid]).fetchone() == (0,)


def test_a_path_with_functions_of_other_people_changes_nothing(relay: Connection, writer: Connection) -> None:
    writer.execute("""
        CREATE SCHEMA trap;
        CREATE FUNCTION trap.pg_try_advisory_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';
        CREATE FUNCTION trap.pg_advisory_unlock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';
        SET search_path = trap, pg_catalog
    """)
    fall_asleep(relay)

    writer.execute(INSERT)

    assert rings(relay, writer) == 1


def test_a_transaction_with_the_bell_off_does_not_ring_and_the_next_one_does(
    relay: Connection, writer: Connection
) -> None:
    fall_asleep(relay)

    with writer.transaction():
        writer.execute("SET LOCAL outbox.ring = off")
        writer.execute(INSERT)
    assert rings(relay, writer) == 0

    writer.execute(INSERT)
    assert rings(relay, writer) == 1
