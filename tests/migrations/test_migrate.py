"""`relay.operate.schema.migrate`: to head from anywhere, by anybody, as often as one likes."""

import io
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.errors import SchemaError
from relay.operate.schema.migrate import current_revision, downgrade, migrate, write_sql
from relay.servers.postgres.compatibility import head_revision
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import wait_for
from tests.migrations.catalog import description
from tests.migrations.conftest import url_of
from tests.support.revision import is_at_head

pytestmark = pytest.mark.every_postgres

MIGRATE = """
import sys
from relay.operate.schema.migrate import migrate
from relay.config.settings import DatabaseSettings
migrate(DatabaseSettings(url=sys.argv[1]))
"""


def test_an_empty_database_is_behind(empty_database: DatabaseSettings) -> None:
    assert current_revision(empty_database) is None
    assert not is_at_head(empty_database)


def test_migrate_brings_an_empty_database_to_head(empty_database: DatabaseSettings) -> None:
    migrate(empty_database)

    assert current_revision(empty_database) == head_revision()
    assert is_at_head(empty_database)


def test_migrating_again_changes_nothing(database: DatabaseSettings) -> None:
    before = description(url_of(database))

    migrate(database)

    assert description(url_of(database)) == before


def test_several_processes_may_migrate_at_once(empty_database: DatabaseSettings) -> None:
    command = [sys.executable, "-c", MIGRATE, url_of(empty_database)]
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"

    with psycopg.connect(url_of(empty_database), autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(hashtextextended('outbox.migrate', 0))")
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
        wait_for(lambda: connection.execute(waiting).fetchone() == (4,), "all four wait for the lock", 60)
    ends = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]

    assert ends == [("", 0)] * 4
    assert is_at_head(empty_database)


def test_the_printed_sql_makes_the_same_schema(empty_database: DatabaseSettings, database: DatabaseSettings) -> None:
    output = io.StringIO()

    write_sql(empty_database, output)
    with psycopg.connect(url_of(empty_database), autocommit=True) as connection:
        connection.execute(output.getvalue().encode())

    assert description(url_of(empty_database)) == description(url_of(database))
    assert is_at_head(empty_database)


def test_a_downgrade_leaves_no_table_and_an_upgrade_brings_all_back(database: DatabaseSettings) -> None:
    before = description(url_of(database))

    downgrade(database, "base")
    bare = description(url_of(database))
    migrate(database)

    assert [line for line in bare if "migration" not in line] == []
    assert description(url_of(database)) == before


def test_another_schema_name_works(empty_database: DatabaseSettings) -> None:
    database = empty_database.model_copy(update={"schema_name": "events"})
    migrate(database)

    with psycopg.connect(url_of(database), autocommit=True) as relay, psycopg.connect(url_of(database)) as writer:
        relay.execute('LISTEN "events.doorbell"')
        relay.execute("SELECT pg_advisory_lock_shared(hashtextextended('events.doorbell', 0))")
        writer.execute("INSERT INTO events.message (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')")
        writer.execute("UPDATE events.message SET state = 'sent', sent_at = now()")
        writer.execute("SELECT events.ensure_sent_days(current_date + 5, 1)")
        writer.commit()

        assert [notice.channel for notice in relay.notifies(timeout=10, stop_after=1)] == ["events.doorbell"]
        assert writer.execute("SELECT count(*) FROM events.message_sent").fetchone() == (1,)
        assert writer.execute("SELECT events.attached_day('message_sent', current_date + 5) IS NULL").fetchone() == (
            False,
        )
    assert description(url_of(database)) == []


def test_two_schemas_in_one_database_do_not_meet(database: DatabaseSettings) -> None:
    other = database.model_copy(update={"schema_name": "events"})

    migrate(other)
    downgrade(other, "base")

    assert is_at_head(database)
    assert not is_at_head(other)


@pytest.fixture
def owner(empty_database: DatabaseSettings, postgres: PostgresServer) -> Iterator[DatabaseSettings]:
    """A role that owns the schema and may not create another."""
    name = "schema_owner"
    with psycopg.connect(url_of(empty_database), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'owner'")
        connection.execute(f"CREATE SCHEMA outbox AUTHORIZATION {name}")
        url = postgres.url(connection.info.dbname, user=name, password="owner")
        yield DatabaseSettings.model_validate({"url": url})
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")


def test_the_owner_of_the_schema_needs_no_other_right(owner: DatabaseSettings) -> None:
    migrate(owner)

    assert is_at_head(owner)


def test_a_refused_migration_says_why_and_leaves_nothing(owner: DatabaseSettings) -> None:
    other_schema = owner.model_copy(update={"schema_name": "events"})

    with pytest.raises(SchemaError, match="permission denied for database"):
        migrate(other_schema)

    assert current_revision(other_schema) is None


def test_a_migration_that_fails_half_way_is_undone(empty_database: DatabaseSettings) -> None:
    with psycopg.connect(url_of(empty_database), autocommit=True) as connection:
        connection.execute("CREATE SCHEMA outbox; CREATE TABLE outbox.batch ()")
    before = description(url_of(empty_database))

    with pytest.raises(SchemaError, match='relation "batch" already exists'):
        migrate(empty_database)

    assert description(url_of(empty_database)) == before
