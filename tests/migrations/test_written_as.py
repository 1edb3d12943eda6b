"""0021: each row tells the role that wrote it, which a writer cannot name. Rows from before tell nothing."""

import secrets
from collections.abc import Iterator
from typing import LiteralString

import pytest
from psycopg.sql import SQL, Identifier

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.migrations.earlier_roles import earlier_roles
from tests.support.roles import allowed, granted_roles

pytestmark = pytest.mark.every_postgres

COLUMNS = "aggregate_type, event_type, payload"
INSERT = "INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('invoice', 'Issued', '1')"
WRITTEN_AS = "SELECT written_as FROM outbox.message ORDER BY id"
FORGE: list[LiteralString] = [
    "INSERT INTO outbox.message (aggregate_type, event_type, payload, written_as) VALUES ('a', 'e', '1', 'shipping')",
    "INSERT INTO outbox.message_pending (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')",
    "COPY outbox.message (aggregate_type, event_type, payload, written_as) FROM STDIN",
    "UPDATE outbox.message SET written_as = 'shipping'",
    "ALTER TABLE outbox.message ALTER COLUMN written_as SET DEFAULT 'shipping'",
]
GRANTS = """
    GRANT SELECT ON outbox.message_state TO {relay} WITH GRANT OPTION;
    GRANT SELECT (state, created_at) ON outbox.message_state TO {dashboard};
    GRANT EXECUTE ON FUNCTION outbox.sent(timestamptz, timestamptz) TO {dashboard};
"""
RIGHTS = """
    SELECT object, privilege_type, is_grantable, pg_get_userbyid(grantee)
    FROM (
        SELECT relname, relacl FROM pg_class WHERE oid = 'outbox.message_state'::regclass
        UNION ALL
        SELECT attname, attacl FROM pg_attribute WHERE attrelid = 'outbox.message_state'::regclass
        UNION ALL
        SELECT proname, proacl FROM pg_proc WHERE proname = 'sent'
    ) AS given (object, rights)
    CROSS JOIN LATERAL aclexplode(rights)
    ORDER BY 1, 2, 4
"""


@pytest.fixture
def writer(connection: Connection) -> Iterator[str]:
    """A login with the rights of a writer, which the session acts as."""
    name = f"billing_{secrets.token_hex(4)}"
    with granted_roles(connection, name):
        connection.execute(SQL("CREATE ROLE {} LOGIN").format(Identifier(name)))
        connection.execute(SQL("GRANT outbox_writer TO {}").format(Identifier(name)))
        connection.execute(SQL("SET ROLE {}").format(Identifier(name)))
        yield name


def test_a_row_tells_the_role_that_wrote_it(connection: Connection, writer: str) -> None:
    connection.execute(INSERT)
    with connection.cursor() as cursor, cursor.copy(f"COPY outbox.message ({COLUMNS}) FROM STDIN".encode()) as stream:
        stream.write_row(("invoice", "Issued", "1"))
    connection.execute("RESET ROLE")

    assert connection.execute(WRITTEN_AS).fetchall() == [(writer,), (writer,)]


def test_a_function_of_another_role_writes_as_that_role(connection: Connection, writer: str) -> None:
    """Its rights are used, and it decides what is written."""
    connection.execute("RESET ROLE")
    connection.execute(f"CREATE FUNCTION issue() RETURNS void LANGUAGE sql SECURITY DEFINER AS $$ {INSERT} $$".encode())
    connection.execute(SQL("SET ROLE {}").format(Identifier(writer)))
    connection.execute("SELECT issue()")
    connection.execute("RESET ROLE")

    assert connection.execute("SELECT written_as = current_user FROM outbox.message").fetchall() == [(True,)]


@pytest.mark.parametrize("name", ["outbox_writer", "outbox_publisher", "outbox_spark", "outbox_console"])
def test_no_role_names_another_as_the_writer(connection: Connection, name: LiteralString) -> None:
    with granted_roles(connection):
        assert allowed(connection, name, FORGE) == []


def test_a_row_from_before_tells_no_role(connection: Connection, database: DatabaseSettings) -> None:
    downgrade(database, "0020")
    connection.execute(INSERT)

    migrate(database)

    assert connection.execute(WRITTEN_AS).fetchall() == [("",)]


def test_a_row_that_an_earlier_release_marks_does_not_tell_the_relays_role(connection: Connection) -> None:
    connection.execute("""
        INSERT INTO outbox.message_sent (id, aggregate_type, event_type, payload, state, sent_at)
        VALUES (1, 'invoice', 'Issued', '1', 'sent', now())
    """)

    assert connection.execute(WRITTEN_AS).fetchall() == [("",)]


def test_the_way_back_keeps_the_rights_on_the_view(connection: Connection, database: DatabaseSettings) -> None:
    with earlier_roles(connection, GRANTS):
        rights, before = connection.execute(RIGHTS).fetchall(), description(url_of(database))
        downgrade(database, "0020")
        kept = connection.execute(RIGHTS).fetchall()
        migrate(database)
        again, after = connection.execute(RIGHTS).fetchall(), description(url_of(database))

    assert rights == kept == again
    assert len(rights) > len(GRANTS.split(";"))
    assert before == after


def test_the_way_back_works_where_nobody_was_granted_the_view(
    connection: Connection, database: DatabaseSettings
) -> None:
    downgrade(database, "0020")

    assert connection.execute("SELECT count(*) FROM outbox.message_state").fetchone() == (0,)


def test_a_migration_rewrites_no_row(connection: Connection, database: DatabaseSettings) -> None:
    downgrade(database, "0020")
    files = "SELECT inhrelid::regclass::text, pg_relation_filenode(inhrelid) FROM pg_inherits ORDER BY 1"
    before = connection.execute(files).fetchall()

    migrate(database)

    assert connection.execute(files).fetchall() == before
