"""Migrations during open transactions: writers go on, and what is in the way is named."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest
import sqlalchemy as sa
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.errors import BusyError
from relay.operate.schema import lock_wait
from relay.operate.schema.lock_wait import LockLimits, LockWait
from relay.operate.schema.migrate import current_revision, downgrade, migrate, sqlalchemy_engine
from relay.servers.postgres.compatibility import head_revision
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import wait_for
from tests.migrations.conftest import url_of
from tests.support.revision import is_at_head

BRIEF = LockLimits(lock_timeout=0.5, wait=60)
ONCE = LockLimits(lock_timeout=3, wait=0.1)
OLDER = [f"{number:04}" for number in range(1, int(head_revision()))]
LOCKS_MESSAGE = "0002"  # the next one adds a column to `message`
INSERT = "INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')"
PARTS = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox.message'::regclass"
HAVE_WAITED = """
    SELECT relation::regclass::text FROM pg_locks
    WHERE NOT granted AND clock_timestamp() - waitstart > interval '1.5 s'
"""
HAVE_WAITED_HALF = "SELECT 1 FROM pg_locks WHERE NOT granted AND clock_timestamp() - waitstart > interval '0.5 s'"
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outbox.message'::regclass"


@pytest.mark.every_postgres
def test_a_writer_goes_on_while_a_migration_waits_for_a_reader(empty_database: DatabaseSettings) -> None:
    migrate(empty_database, LOCKS_MESSAGE)
    url = url_of(empty_database)
    with (
        psycopg.connect(url) as reader,
        psycopg.connect(url, autocommit=True, options="-c statement_timeout=20s") as writer,
        ThreadPoolExecutor(1) as thread,
    ):
        reader.execute("SELECT count(*) FROM outbox.message")
        migrating = thread.submit(migrate, empty_database)
        try:
            wait_for(lambda: writer.execute(WAITING).fetchone() == (1,), "the migration waits", 60)
            for _ in range(20):
                writer.execute(INSERT)
        finally:
            reader.rollback()
        migrating.result(timeout=60)

    assert is_at_head(empty_database)


@pytest.mark.parametrize("revision", OLDER)
def test_from_each_version_to_head_and_back_beside_a_reader(empty_database: DatabaseSettings, revision: str) -> None:
    migrate(empty_database, revision)
    url = url_of(empty_database)
    for work in (migrate, downgrade):
        with (
            psycopg.connect(url) as reader,
            psycopg.connect(url, autocommit=True, options="-c statement_timeout=20s") as writer,
            ThreadPoolExecutor(1) as thread,
        ):
            reader.execute("SELECT count(*) FROM outbox.message")
            told: list[str] = []  # the first line names the database
            target = "head" if work is migrate else revision
            working = thread.submit(work, empty_database, target, limits=BRIEF, tell=told.append)
            try:
                wait_for(lambda: working.done() or len(told) > 2, "it is done, or waits again", 60)  # noqa: B023
                writer.execute(INSERT)
            finally:
                reader.rollback()
            working.result(timeout=60)

            pid = reader.info.backend_pid
            waits = told[1:]
            assert not waits or any(f"session {pid}" in line and "outbox.message" in line for line in waits)

    assert current_revision(empty_database) == revision


def test_what_cannot_be_locked_is_named_and_nothing_of_it_is_done(empty_database: DatabaseSettings) -> None:
    migrate(empty_database, LOCKS_MESSAGE)
    with psycopg.connect(url_of(empty_database), application_name="nightly report") as reader:
        reader.execute("SELECT count(*) FROM outbox.message")

        with pytest.raises(BusyError) as refused:
            migrate(empty_database, limits=ONCE)

        user, pid = reader.info.user, reader.info.backend_pid
    words = str(refused.value)
    assert f"session {pid} of role {user} (nightly report), idle in transaction, its transaction open for " in words
    assert "outbox.message" in words
    assert f"pg_terminate_backend({pid})" in words
    assert current_revision(empty_database) == LOCKS_MESSAGE


def test_the_locks_of_one_try_are_waited_for_together_no_longer_than_for_one(empty_database: DatabaseSettings) -> None:
    migrate(empty_database, LOCKS_MESSAGE)
    url = url_of(empty_database)
    told: list[str] = []
    with ExitStack() as open_, ThreadPoolExecutor(1) as thread:
        looking = open_.enter_context(psycopg.connect(url, autocommit=True))
        readers = {}
        for (name,) in looking.execute(PARTS).fetchall():
            readers[name] = open_.enter_context(psycopg.connect(url))
            readers[name].execute(f"LOCK TABLE ONLY {name} IN ACCESS SHARE MODE".encode())
        migrating = thread.submit(migrate, empty_database, limits=LockLimits(lock_timeout=3), tell=told.append)

        def let_one_go() -> bool:
            """Once the migration has waited for it for half of the time."""
            for (name,) in looking.execute(HAVE_WAITED).fetchall():
                readers.pop(name).rollback()
            return len(told) > 1 or not readers

        try:
            wait_for(let_one_go, "the migration has waited for each, or gave way", 60)
        finally:
            for reader in readers.values():
                reader.rollback()
        migrating.result(timeout=60)

    assert "is held by session" in told[1]
    assert is_at_head(empty_database)


def test_another_migration_is_waited_for_within_limits_and_named(empty_database: DatabaseSettings) -> None:
    with psycopg.connect(url_of(empty_database), autocommit=True, application_name="the other") as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('outbox.migrate', 0))")

        with pytest.raises(BusyError, match="the other") as refused:
            migrate(empty_database, limits=ONCE)

    assert "another relay migrate" in str(refused.value)
    assert current_revision(empty_database) is None


def test_a_wait_that_ends_at_its_own_limit_is_not_cancelled_as_well(
    empty_database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at all the time, some of the tries are seen waiting in the moment in which their limit ends them."""
    monkeypatch.setattr(lock_wait, "HOLDERS_LOOK", 0)
    with psycopg.connect(url_of(empty_database), autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('outbox.migrate', 0))")

        with pytest.raises(BusyError, match="is held by session"):
            migrate(empty_database, limits=LockLimits(lock_timeout=0.01, wait=5))


def test_a_try_that_gives_way_too_late_does_not_take_the_next_one_with_it(
    empty_database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second wait of a try ends at its own limit while the looking session still sends the cancel."""
    monkeypatch.setattr(lock_wait, "HOLDERS_LOOK", 0.01)
    monkeypatch.setattr(lock_wait, "GIVE_WAY", f"{lock_wait.GIVE_WAY} FROM pg_sleep(1)")
    tries: list[bool] = []
    with (
        psycopg.connect(url_of(empty_database), autocommit=True) as other,
        sqlalchemy_engine(empty_database).connect() as connection,
        LockWait(empty_database, connection, LockLimits(lock_timeout=1.0, wait=5), lambda _: None) as waiting,
        ThreadPoolExecutor(1) as thread,
    ):
        other.execute("SELECT pg_advisory_lock(1), pg_advisory_lock(2)")

        def take_both() -> None:
            tries.append(True)
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(1)"))
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(2)"))
            connection.rollback()

        working = thread.submit(waiting.run, take_both, "both locks", rest=0)
        wait_for(lambda: other.execute(HAVE_WAITED_HALF).fetchone() is not None, "the first lock is waited for", 60)
        other.execute("SELECT pg_advisory_unlock(1)")
        wait_for(lambda: len(tries) > 1 or working.done(), "the next try, or none", 60)
        other.execute("SELECT pg_sleep(0.5), pg_advisory_unlock(2)")
        working.result(timeout=60)

    assert len(tries) > 1


def test_a_role_without_a_second_connection_migrates_all_the_same(
    empty_database: DatabaseSettings, postgres: PostgresServer
) -> None:
    name = "single"
    with psycopg.connect(url_of(empty_database), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'single' CONNECTION LIMIT 1")
        connection.execute(f"CREATE SCHEMA outbox AUTHORIZATION {name}")
        url = postgres.url(connection.info.dbname, user=name, password="single")

        migrate(DatabaseSettings(url=SecretStr(url)))

        assert is_at_head(empty_database)
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")
