"""What an attacker or an old script left in the schema is named, and so is who holds a lock of ours."""

import secrets
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest

from relay.config.settings import Settings
from relay.operate.doctor.rights import FUNCTIONS, TABLES, TRIGGERS
from relay.operate.holders import foreign_locks
from relay.operate.status import read_status
from relay.servers.postgres.tables import Tables
from relay.testing.servers.postgres import PostgresServer
from tests.doctor.findings import OK, WARNING, look, operator
from tests.support.roles import granted_roles

pytestmark = pytest.mark.every_postgres

HELPERS = """
    CREATE FUNCTION public.steal() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
    CREATE FUNCTION public.steals(text) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN true; END';
    CREATE FUNCTION public.likes(text, text) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true';
    CREATE OPERATOR public.=~~ (LEFTARG = text, RIGHTARG = text, FUNCTION = public.likes);
"""
LOCKS = {
    "outbox.lane": "pg_advisory_lock(hashtext('outbox.lane'), 3)",
    "outbox.node": "pg_advisory_lock(hashtext('outbox.node'), 1)",
    "outbox.pool": "pg_advisory_lock(hashtext('outbox.pool'), 0)",
    "outbox.park": "pg_advisory_lock(hashtextextended('outbox.park', 0))",
    "outbox.doorbell": "pg_advisory_lock(hashtextextended('outbox.doorbell', 0))",
    "outbox.retention": "pg_advisory_lock(hashtextextended('outbox.retention', 0))",
}


@pytest.fixture
def database(settings: Settings) -> Iterator[psycopg.Connection]:
    with operator(settings) as connection, granted_roles(connection):
        yield connection


def test_a_migrated_schema_has_what_the_lists_say(database: psycopg.Connection, settings: Settings) -> None:
    tables = database.execute("""
        SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p', 'v')
            AND relname !~ '_[0-9]{8}$'
    """)
    functions = database.execute("""
        SELECT proname || '(' || oidvectortypes(proargtypes) || ')' FROM pg_proc
        WHERE pronamespace = 'outbox'::regnamespace
    """)
    triggers = database.execute("""
        SELECT tgname || ' ON ' || relname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
        WHERE NOT tgisinternal
    """)

    assert {name for (name,) in tables} == set(TABLES)
    assert {name for (name,) in functions} == set(FUNCTIONS)
    assert {name for (name,) in triggers} == set(TRIGGERS)
    for check in ("database.foreign", "database.owners", "database.consumers", "database.locks"):
        assert [finding.verdict for finding in look(settings, check)] == [OK]


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        (
            "CREATE TRIGGER steal BEFORE INSERT ON outbox.processed_message EXECUTE FUNCTION public.steal()",
            "trigger steal ON processed_message, which calls steal()",
        ),
        (
            "CREATE OR REPLACE TRIGGER ring AFTER INSERT ON outbox.message EXECUTE FUNCTION public.steal()",
            "trigger ring ON message, which calls steal()",
        ),
        (
            """
            CREATE OR REPLACE TRIGGER ring AFTER INSERT ON outbox.message
            EXECUTE FUNCTION outbox.refuse_foreign_batch()
            """,
            "trigger ring ON message, which calls outbox.refuse_foreign_batch()",
        ),
        (
            """
            CREATE OR REPLACE TRIGGER ring AFTER INSERT ON outbox.message
            WHEN (public.steals('x')) EXECUTE FUNCTION outbox.ring()
            """,
            "function steals(text) in trigger ring on table outbox.message",
        ),
        (
            "ALTER TABLE outbox.processed_message ADD CONSTRAINT steal CHECK (public.steals(business_key))",
            "function steals(text) in constraint steal on table outbox.processed_message",
        ),
        (
            "ALTER TABLE outbox.processed_message ADD CONSTRAINT steal CHECK (business_key OPERATOR(public.=~~) 'x')",
            "operator =~~(text,text) in constraint steal on table outbox.processed_message",
        ),
        (
            "ALTER TABLE outbox.processed_message ALTER COLUMN business_key SET DEFAULT public.steals('x')::text",
            "function steals(text) in default value for column business_key of table outbox.processed_message",
        ),
        (
            "CREATE INDEX steal ON outbox.pool (public.steals('x'))",
            "function steals(text) in index outbox.steal",
        ),
        (
            "CREATE INDEX steal ON outbox.pool ((1)) WHERE public.steals('x')",
            "function steals(text) in index outbox.steal",
        ),
        (
            "CREATE STATISTICS outbox.steal ON (public.steals('x')), (1) FROM outbox.pool",
            "function steals(text) in statistics object outbox.steal",
        ),
        ("CREATE RULE steal AS ON INSERT TO outbox.batch DO INSTEAD NOTHING", "rule steal ON batch"),
        ("CREATE POLICY steal ON outbox.batch USING (true)", "policy steal ON batch"),
        ("CREATE VIEW outbox.steal AS SELECT 1", "table or view steal"),
        (
            """
            CREATE TABLE outbox.message_sent_20200101 ();
            COMMENT ON TABLE outbox.message_sent_20200101 IS 'outbox retention drops this day'
            """,
            "table message_sent_20200101 (an earlier release began to drop this day",
        ),
        ("CREATE FUNCTION outbox.steal() RETURNS integer LANGUAGE sql AS 'SELECT 1'", "function outbox.steal()"),
        (
            "CREATE FUNCTION outbox.ensure_sent_days(text) RETURNS integer LANGUAGE sql AS 'SELECT 1'",
            "function outbox.ensure_sent_days(text)",
        ),
    ],
)
def test_what_no_migration_made_is_named(
    database: psycopg.Connection, settings: Settings, statement: str, name: str
) -> None:
    database.execute(HELPERS)
    database.execute(statement.encode())

    (finding,) = look(settings, "database.foreign")

    assert finding.verdict == WARNING
    assert name in finding.words


def test_an_owner_of_a_part_is_named(database: psycopg.Connection, settings: Settings) -> None:
    database.execute("GRANT CREATE ON SCHEMA outbox TO outbox_retention")
    database.execute("ALTER TABLE outbox.processed_message OWNER TO outbox_retention")
    database.execute("ALTER FUNCTION outbox.ensure_inbox_days(date, integer) OWNER TO outbox_retention")
    database.execute("ALTER VIEW outbox.message_state OWNER TO outbox_retention")

    (finding,) = look(settings, "database.owners")
    database.execute(finding.remedy.encode())
    (after,) = look(settings, "database.owners")

    assert finding.verdict == WARNING
    assert "role outbox_retention owns ensure_inbox_days, message_state, processed_message" in finding.words
    assert after.verdict == OK


def test_logins_that_share_an_inbox_are_named(database: psycopg.Connection, settings: Settings) -> None:
    logins = sorted(f"consumer_{secrets.token_hex(4)}" for _ in range(2))
    try:
        for login in logins:
            database.execute(f"CREATE ROLE {login} LOGIN IN ROLE outbox_consumer".encode())

        (finding,) = look(settings, "database.consumers")
    finally:
        database.execute(f"DROP ROLE {', '.join(logins)}".encode())

    assert finding.verdict == WARNING
    assert ", ".join(logins) in finding.words


@pytest.mark.parametrize("lock", LOCKS)
def test_a_login_without_a_grant_that_holds_a_lock_is_named(
    database: psycopg.Connection, settings: Settings, postgres: PostgresServer, lock: str
) -> None:
    login = f"stranger_{secrets.token_hex(4)}"
    url = urlsplit(settings.database.url.get_secret_value())
    database.execute(f"CREATE ROLE {login} LOGIN PASSWORD 'x'".encode())
    try:
        as_stranger = postgres.url(url.path.removeprefix("/"), user=login, password="x")
        with psycopg.connect(as_stranger, application_name="report", autocommit=True) as stranger:
            stranger.execute(f"SELECT {LOCKS[lock]}".encode())
            pid = stranger.info.backend_pid

            (finding,) = look(settings, "database.locks")
            status = read_status(Tables(database, "outbox"))
    finally:
        database.execute(f"DROP ROLE {login}".encode())

    assert finding.verdict == WARNING
    told = f"session {pid} of role {login}, 'report' holds the lock {lock} "
    assert finding.words.startswith(told)
    assert finding.words in status.reasons


def test_the_locks_of_the_roles_themselves_are_not_foreign(
    database: psycopg.Connection, settings: Settings, postgres: PostgresServer
) -> None:
    name = urlsplit(settings.database.url.get_secret_value()).path.removeprefix("/")
    holders = {"outbox.doorbell": "outbox_writer", "outbox.retention": "outbox_retention"}
    for lock, call in LOCKS.items():
        login = f"insider_{secrets.token_hex(4)}"
        role = holders.get(lock, "outbox_relay")
        database.execute(f"CREATE ROLE {login} LOGIN PASSWORD 'x' IN ROLE {role}".encode())
        try:
            with psycopg.connect(postgres.url(name, user=login, password="x"), autocommit=True) as insider:
                insider.execute(f"SELECT {call}".encode())

                # The session before may end only now, and its role is gone.
                assert login not in {each.role for each in foreign_locks(Tables(database, "outbox"))}
        finally:
            database.execute(f"DROP ROLE {login}".encode())
