"""0015: replays become jobs, also those of an older release, and what that release parks is grouped."""

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg.sql import SQL, Identifier

from relay.config.settings import DatabaseSettings
from relay.jobs.job import list_jobs
from relay.operate.failures import list_parked_groups
from relay.operate.schema.lock_wait import LockLimits
from relay.operate.schema.migrate import downgrade, migrate
from relay.operate.session import session
from relay.testing.servers.process import wait_for
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of

PARKED = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload, state, parked_at, last_error)
    SELECT 'a', 'e', '1', 'parked', now(), 'refused for ' || n FROM generate_series(1, 3) AS n
"""
# As release 0.1.0 has them (relay/operate/sent/job.py and session.py of that release).
MAKE = """
    INSERT INTO outbox.replay (made_by, filter, to_exchange, routing_key) VALUES ('ada', '{}', 'x', NULL) RETURNING id
"""
SAVE = """
    WITH saved AS (
        UPDATE outbox.replay
        SET selected = 3, replayed = 2, failed = 1, position = 9, state = 'done', saved_at = now()
        WHERE id = %(job)s AND state IN ('open', 'done')
        RETURNING id
    ), noted AS (
        INSERT INTO outbox.replay_failure (replay_id, id, message_id, reason)
        SELECT saved.id, 9, gen_random_uuid(), 'too long' FROM saved
        ON CONFLICT DO NOTHING
    )
    SELECT count(*) FROM saved
"""
GROUPS = "SELECT cause FROM outbox.parked_failure JOIN outbox.failure AS named ON named.id = parked_failure.failure"
# Of three parked rows, one goes, one fails in another way, and one comes.
CHANGE = """
    DELETE FROM outbox.message_parked WHERE last_error = 'refused for 1';
    UPDATE outbox.message_parked SET last_error = 'too large' WHERE last_error = 'refused for 2';
    INSERT INTO outbox.message (aggregate_type, event_type, payload, state, parked_at, last_error)
        VALUES ('a', 'e', '1', 'parked', now(), 'unreadable')
"""
WAITS = "SELECT FROM pg_locks WHERE NOT granted AND mode = 'ShareRowExclusiveLock'"
READ_BY_WAITING = """
    SELECT relname FROM pg_locks JOIN pg_class ON pg_class.oid = relation
    WHERE granted AND mode = 'AccessShareLock' AND relname = 'message_parked'
        AND pid IN (SELECT pid FROM pg_locks WHERE NOT granted)
"""
JOB = "INSERT INTO outbox.job (kind, source, made_by, filter) VALUES ('retry', 'parked', 'ada', '{}')"
READ = "SELECT id, state, made_by, selected, replayed, failed, position FROM outbox.replay"


def test_a_migration_back_and_forth_keeps_replays_rows_and_the_audit(
    database: DatabaseSettings, connection: Connection
) -> None:
    (job,) = connection.execute(MAKE).fetchone() or (0,)
    connection.execute(SAVE, {"job": job})
    connection.execute(PARKED)
    connection.execute("""
        INSERT INTO outbox.job (kind, source, made_by, filter) VALUES ('retry', 'parked', 'ada', '{}');
        INSERT INTO outbox.message (aggregate_type, event_type, payload, state) VALUES ('a', 'e', '1', 'archived');
        INSERT INTO outbox.operator_audit (command, target, done_by) VALUES ('jobs cancel', '1', 'ada');
    """)
    before, replays = description(url_of(database)), connection.execute(READ).fetchall()

    downgrade(database, "0014")
    without = connection.execute(READ).fetchall()
    states = connection.execute("SELECT state, count(*) FROM outbox.message GROUP BY state").fetchall()
    audit = connection.execute("SELECT command FROM outbox.operator_audit").fetchall()
    migrate(database)

    assert without == replays == [(1, "done", "ada", 3, 2, 1, 9)]
    assert states == [("parked", 4)]
    assert audit == [("replay cancel",)]
    assert description(url_of(database)) == before


@pytest.mark.every_postgres
def test_rows_that_are_parked_when_the_tables_come_are_grouped(
    database: DatabaseSettings, connection: Connection
) -> None:
    downgrade(database, "0014")
    connection.execute(PARKED)

    migrate(database)

    with session(database) as tables:
        assert [(each.cause, each.count) for each in list_parked_groups(tables)] == [("refused for *", 3)]


def test_rows_parked_or_released_while_the_others_are_grouped_are_noted(
    database: DatabaseSettings, connection: Connection, other_connection: Connection
) -> None:
    """The migration reads the causes before it locks the parked rows, and once more what has changed until then."""
    downgrade(database, "0014")
    connection.execute(PARKED)
    with ThreadPoolExecutor(1) as thread, connection.transaction():
        connection.execute(CHANGE)
        migrating = thread.submit(migrate, database, limits=LockLimits(lock_timeout=60))
        wait_for(lambda: other_connection.execute(WAITS).fetchone() is not None, "it waits for its lock", 60)
        read = other_connection.execute(READ_BY_WAITING).fetchall()
    migrating.result(timeout=60)

    assert read == [("message_parked",)]
    assert other_connection.execute(f"{GROUPS} ORDER BY cause").fetchall() == [
        ("refused for *",), ("too large",), ("unreadable",)
    ]  # fmt: skip


def test_an_older_release_makes_and_saves_its_replays(database: DatabaseSettings, connection: Connection) -> None:
    (job,) = connection.execute(MAKE).fetchone() or (0,)
    saved = connection.execute(SAVE, {"job": job}).fetchone()
    again = connection.execute(SAVE, {"job": job}).fetchone()

    with session(database) as tables:
        (found,) = list_jobs(tables, limit=9)
    assert saved == again == (1,)
    assert connection.execute(READ).fetchall() == [(job, "done", "ada", 3, 2, 1, 9)]
    assert (found.kind, found.source, found.state, found.done, found.failed) == ("replay", "sent", "done", 2, 1)
    assert connection.execute("SELECT count(*) FROM outbox.replay_failure").fetchone() == (1,)


def test_an_older_release_sees_no_other_jobs(connection: Connection) -> None:
    connection.execute(JOB)

    assert connection.execute(READ).fetchall() == []


def test_a_role_that_makes_replays_may_run_jobs_before_the_roles_are_made_again(
    database: DatabaseSettings, connection: Connection
) -> None:
    downgrade(database, "0014")
    name = f"Relay {secrets.token_hex(6)}"
    relay = {"relay": Identifier(name)}
    connection.execute(
        SQL("""
            CREATE ROLE {relay};
            GRANT USAGE ON SCHEMA outbox TO {relay};
            GRANT SELECT, INSERT ON outbox.replay, outbox.replay_failure TO {relay};
            GRANT UPDATE (state, selected, replayed, failed, position, saved_at) ON outbox.replay TO {relay};
            GRANT SELECT, UPDATE (state, last_error, parked_at) ON outbox.message TO {relay};
        """).format(**relay)
    )
    try:
        migrate(database)
        connection.execute("INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')")
        connection.execute(SQL("SET ROLE {relay}").format(**relay))
        connection.execute(
            "INSERT INTO outbox.job (kind, source, made_by, filter) VALUES ('retry', 'parked', 'a', '{}')"
        )
        connection.execute("UPDATE outbox.job SET done = 1, released = 1, stage = 1, state = 'paused'")
        connection.execute("INSERT INTO outbox.job_row VALUES (1, 1, 1)")
        connection.execute("DELETE FROM outbox.job_row")
        (job,) = connection.execute(MAKE).fetchone() or (0,)
        connection.execute(SAVE, {"job": job})
        connection.execute("UPDATE outbox.message SET state = 'parked', last_error = 'x' WHERE state = 'pending'")
        groups = connection.execute(
            "SELECT cause FROM outbox.failure JOIN outbox.parked_failure ON failure = failure.id"
        )
        assert groups.fetchall() == [("x",)]
    finally:
        connection.execute(SQL("RESET ROLE; DROP OWNED BY {relay}; DROP ROLE {relay}").format(**relay))
