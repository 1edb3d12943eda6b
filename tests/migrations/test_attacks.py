"""A role of `config/roles.sql` in the hands of an attacker gets the rights of no other role."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import LiteralString

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.errors import SchemaError
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.conftest import Connection
from tests.support.roles import NAMES, SCRIPT, allowed, granted_roles, role

pytestmark = pytest.mark.every_postgres

# What an attacker has in any case: a schema where the role may create what it likes.
ATTIC = """
    CREATE SCHEMA attic;
    GRANT USAGE, CREATE ON SCHEMA attic TO PUBLIC;
    CREATE TABLE attic.loot (stolen_as text);
    GRANT INSERT ON attic.loot TO PUBLIC;
    CREATE FUNCTION attic.steal() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO attic.loot VALUES (current_user); RETURN NEW; END $$;
    CREATE FUNCTION attic.steal_row() RETURNS boolean LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO attic.loot VALUES (current_user); RETURN true; END $$;
"""
TAKE_OVER: list[LiteralString] = [
    *(
        f"CREATE TRIGGER steal BEFORE {event} ON outbox.{table} FOR EACH ROW EXECUTE FUNCTION attic.steal()"
        for table in ("message", "message_sent", "message_parked", "processed_message", "held_message", "batch")
        for event in ("INSERT", "UPDATE")
    ),
    *(
        f"CREATE TRIGGER steal BEFORE {event} ON outbox.{table} FOR EACH ROW EXECUTE FUNCTION attic.steal()"
        for table in ("job", "parked_failure", "node")
        for event in ("INSERT", "UPDATE")
    ),
    *(
        f"CREATE OR REPLACE FUNCTION outbox.{function} RETURNS integer LANGUAGE sql AS 'SELECT 1'"
        for function in ("ensure_inbox_days(first date, days integer)", "ensure_sent_days(first date, days integer)")
    ),
    "ALTER FUNCTION outbox.ensure_inbox_days(date, integer) SET search_path = attic",
    "CREATE OR REPLACE FUNCTION outbox.ring() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
    "CREATE FUNCTION outbox.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT pg_catalog.now()'",
    "CREATE OPERATOR outbox.=== (FUNCTION = int4eq, LEFTARG = integer, RIGHTARG = integer)",
    "CREATE VIEW outbox.processed AS SELECT 1",
    "CREATE TABLE outbox.mine ()",
    "CREATE TABLE outbox.message_sent_20000101 ()",
    *(
        statement
        for table in ("message_sent", "processed_message", "batch")
        for statement in (
            f"CREATE RULE steal AS ON INSERT TO outbox.{table} DO INSTEAD NOTHING",
            f"CREATE POLICY steal ON outbox.{table} USING (true)",
            f"ALTER TABLE outbox.{table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE outbox.{table} ADD COLUMN loot text DEFAULT current_user",
            f"ALTER TABLE outbox.{table} OWNER TO current_user",
            f"DROP TABLE outbox.{table}",
            f"TRUNCATE outbox.{table}",
        )
    ),
    "ALTER TABLE outbox.message_sent ALTER COLUMN last_error SET DEFAULT 'x'",
    "ALTER TABLE outbox.processed_message ALTER COLUMN business_key SET DEFAULT 'x'",
    "ALTER DEFAULT PRIVILEGES FOR ROLE postgres GRANT ALL ON TABLES TO PUBLIC",
    "CREATE EVENT TRIGGER steal ON ddl_command_end EXECUTE FUNCTION attic.steal()",
    "SELECT outbox.note_parked()",
    "UPDATE outbox.job SET made_by = 'another'",
    "DELETE FROM outbox.job",
    "DELETE FROM outbox.parked_failure",
    "SELECT outbox.make_day('processed_message', '2040-01-01')",
    "SELECT outbox.sent_day_needed('2040-01-01', 1, false)",
    "UPDATE outbox.inbox_memory SET since = '2040-01-01'",
    """
    INSERT INTO outbox.batch (app_id, version, partitions, token, row_counts, written_as)
    VALUES ('job', 7, 1, gen_random_uuid(), '{}', 'another')
    """,
    "UPDATE outbox.batch SET written_as = 'another'",
    "DELETE FROM outbox.batch",
    "DELETE FROM outbox.processed_message",
]  # fmt: skip
OWNERS = """
    SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class
    WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p', 'S', 'v')
    UNION SELECT DISTINCT pg_get_userbyid(proowner) FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace
"""
# What config/roles.sql did before the migration 0011.
GIVEN_AWAY = """
    GRANT CREATE ON SCHEMA outbox TO outbox_retention;
    ALTER TABLE outbox.message_sent OWNER TO outbox_retention;
    ALTER TABLE outbox.processed_message OWNER TO outbox_retention;
    DO $$ DECLARE part regclass; BEGIN
        FOR part IN SELECT inhrelid FROM pg_inherits
            WHERE inhparent IN ('outbox.message_sent'::regclass, 'outbox.processed_message'::regclass)
        LOOP EXECUTE format('ALTER TABLE %s OWNER TO outbox_retention', part); END LOOP;
    END $$;
"""
FUNCTIONS_GIVEN_AWAY = """
    ALTER FUNCTION outbox.ensure_sent_days(date, integer) OWNER TO outbox_retention;
    ALTER FUNCTION outbox.ensure_inbox_days(date, integer) OWNER TO outbox_retention;
"""
REOWN = """
    DO $$ DECLARE name text; BEGIN
        CREATE ROLE tables_owner;
        ALTER SCHEMA outbox OWNER TO tables_owner;
        FOR name IN SELECT oid::regclass FROM pg_class
            WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'p', 'S')
                AND NOT (relkind = 'S'
                    AND EXISTS (SELECT FROM pg_depend WHERE objid = pg_class.oid AND deptype IN ('a', 'i')))
            ORDER BY relkind = 'p' DESC
        LOOP EXECUTE format('ALTER TABLE %s OWNER TO tables_owner', name); END LOOP;
        FOR name IN SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace
        LOOP EXECUTE format('ALTER FUNCTION %s OWNER TO tables_owner', name); END LOOP;
    END $$
"""
MARK = "outbox retention drops this day"  # of an earlier release


@pytest.fixture(autouse=True)
def roles(connection: Connection) -> Iterator[None]:
    with granted_roles(connection):
        connection.execute(ATTIC.encode())
        yield


@pytest.mark.parametrize("name", NAMES)
def test_no_role_can_make_another_run_its_code(connection: Connection, name: LiteralString) -> None:
    assert allowed(connection, name, TAKE_OVER) == []


def test_an_insert_into_the_inbox_runs_no_code_of_another_role(connection: Connection) -> None:
    """With the ownership of the parent came a trigger that ran with the rights of each consumer."""
    with role(connection, "outbox_retention"), pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("""
            CREATE TRIGGER steal BEFORE INSERT ON outbox.processed_message
            FOR EACH ROW EXECUTE FUNCTION attic.steal()
        """)
    connection.execute("RESET ROLE")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("outbox_relay", "SELECT outbox.ensure_sent_days(pg_catalog.current_date + 5, 1)"),
        ("outbox_consumer", "SELECT outbox.ensure_inbox_days(pg_catalog.current_date + 5, 1)"),
        ("outbox_retention", "SELECT outbox.drop_sent_day(pg_catalog.current_date - 20, false, false)"),
        ("outbox_retention", "SELECT outbox.drop_inbox_day(pg_catalog.current_date - 20, false)"),
    ],
)
def test_a_function_of_the_owner_runs_nothing_that_its_caller_has_made(
    connection: Connection, name: LiteralString, call: LiteralString
) -> None:
    connection.execute("SELECT outbox.make_day('message_sent', current_date - 20)")
    connection.execute("SELECT outbox.make_day('processed_message', current_date - 20)")
    with role(connection, name):
        for schema in ("attic", "pg_temp"):
            connection.execute(
                f"""
                CREATE FUNCTION {schema}.to_char(date, text) RETURNS text LANGUAGE plpgsql AS
                    $$ BEGIN INSERT INTO attic.loot VALUES (current_user); RETURN '20000101'; END $$;
                CREATE FUNCTION {schema}.less(date, date) RETURNS boolean LANGUAGE plpgsql AS
                    $$ BEGIN INSERT INTO attic.loot VALUES (current_user); RETURN true; END $$;
                CREATE OPERATOR {schema}.< (FUNCTION = {schema}.less, LEFTARG = date, RIGHTARG = date);
                CREATE TABLE {schema}.pg_inherits (inhrelid oid, inhparent oid, inhdetachpending boolean);
            """.encode()
            )
        connection.execute("SET search_path = pg_temp, attic, pg_catalog")
        connection.execute(call.replace("pg_catalog.current_date", "current_date").encode())
        connection.execute("RESET search_path")

    assert connection.execute("SELECT count(*) FROM attic.loot").fetchone() == (0,)
    connection.execute("DISCARD TEMP; DROP SCHEMA attic CASCADE")


@pytest.mark.parametrize("is_restored", [False, True])
def test_every_function_of_the_owner_has_a_search_path_and_needs_a_grant(
    connection: Connection, is_restored: bool
) -> None:
    if is_restored:  # by pg_restore --no-acl, which gives every function to everybody
        connection.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox TO PUBLIC")
        connection.execute(SCRIPT.encode())
    query = """
        SELECT proname FROM pg_proc
        WHERE pronamespace = 'outbox'::regnamespace AND prosecdef AND (
            NOT 'search_path=pg_catalog, pg_temp' = ANY (coalesce(proconfig, '{}'))
            OR proacl IS NULL OR EXISTS (SELECT FROM aclexplode(proacl) WHERE grantee = 0))
    """

    assert connection.execute(query).fetchall() == []


@pytest.mark.parametrize("by", ["the script", "the migration"])
def test_what_an_earlier_script_gave_away_comes_back(
    connection: Connection, database: DatabaseSettings, by: str
) -> None:
    if by == "the migration":
        downgrade(database, "0010")
    before = connection.execute(OWNERS).fetchall()
    connection.execute(GIVEN_AWAY)
    if by == "the migration":
        connection.execute(FUNCTIONS_GIVEN_AWAY)
    assert len(connection.execute(OWNERS).fetchall()) == 2

    if by == "the migration":
        migrate(database)
    else:
        connection.execute(SCRIPT.encode())

    assert connection.execute(OWNERS).fetchall() == before
    may_create = "SELECT has_schema_privilege('outbox_retention', 'outbox', 'CREATE')"
    assert connection.execute(may_create).fetchone() == (False,)


@pytest.mark.parametrize(
    "planted",
    [
        (
            "CREATE FUNCTION outbox.ring(stmt text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER"
            " AS 'BEGIN EXECUTE stmt; END'"
        ),
        "CREATE TRIGGER steal BEFORE INSERT ON outbox.processed_message FOR EACH ROW EXECUTE FUNCTION attic.steal()",
        "CREATE RULE steal AS ON INSERT TO outbox.message_sent DO INSTEAD NOTHING",
        "CREATE POLICY steal ON outbox.processed_message USING (true)",
        "ALTER TABLE outbox.processed_message ADD CONSTRAINT steal CHECK (attic.steal_row())",
        "ALTER TABLE outbox.processed_message ALTER COLUMN business_key SET DEFAULT attic.steal_row()::text",
    ],
)
def test_code_that_the_former_owner_left_gets_no_rights_of_the_new_one(
    connection: Connection, database: DatabaseSettings, planted: LiteralString
) -> None:
    downgrade(database, "0010")
    connection.execute(GIVEN_AWAY)
    connection.execute(FUNCTIONS_GIVEN_AWAY)
    with role(connection, "outbox_retention"):
        connection.execute(planted)

    with pytest.raises(SchemaError, match=r"outbox_retention has made what is none of the outbox's: .*(ring|steal)"):
        migrate(database)


def test_the_script_gives_no_function_of_another_role_the_owner_s_rights(connection: Connection) -> None:
    connection.execute(FUNCTIONS_GIVEN_AWAY)

    with pytest.raises(psycopg.errors.RaiseException, match="may have put other code into them"):
        connection.execute(SCRIPT.encode())
    connection.execute("ROLLBACK")


def test_functions_belong_to_the_owner_of_the_tables_whoever_migrates(
    connection: Connection, database: DatabaseSettings
) -> None:
    downgrade(database, "0010")
    connection.execute(REOWN)

    migrate(database)
    connection.execute(SCRIPT.encode())

    assert connection.execute(OWNERS).fetchall() == [("tables_owner",)]
    with role(connection, "outbox_relay"):
        connection.execute("SELECT outbox.ensure_sent_days((pg_catalog.now() AT TIME ZONE 'UTC')::date, 3)")
    connection.execute("DROP SCHEMA outbox, outbox_staging CASCADE; DROP OWNED BY tables_owner; DROP ROLE tables_owner")


def test_days_that_an_earlier_release_left_half_dropped_are_dropped_by_the_migration(
    connection: Connection, other_connection: Connection, database: DatabaseSettings
) -> None:
    today = datetime.now(UTC).date()
    detached, pending, marked, kept = (
        f"outbox.message_sent_{today - timedelta(days=ago):%Y%m%d}" for ago in (20, 21, 22, 23)
    )
    for ago in (20, 21, 22, 23):
        connection.execute("SELECT outbox.make_day('message_sent', %s)", [today - timedelta(days=ago)])
    downgrade(database, "0010")
    for day in (detached, pending, marked):
        connection.execute(f"COMMENT ON TABLE {day} IS '{MARK}'".encode())
    for day in (detached, kept):
        connection.execute(f"ALTER TABLE outbox.message_sent DETACH PARTITION {day} CONCURRENTLY".encode())
    with other_connection.transaction():
        other_connection.execute("SELECT count(*) FROM outbox.message")
        connection.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute(f"ALTER TABLE outbox.message_sent DETACH PARTITION {pending} CONCURRENTLY".encode())

    migrate(database)

    left = "SELECT array_agg(name ORDER BY name) FROM unnest(%s::text[]) AS name WHERE to_regclass(name) IS NOT NULL"
    assert connection.execute(left, [[detached, pending, marked, kept]]).fetchone() == (sorted([marked, kept]),)
    assert connection.execute("SELECT obj_description(%s::regclass)", [marked]).fetchone() == (None,)
