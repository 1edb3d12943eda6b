"""0014, 0016: what marks have counted stays in the totals when the tables go back; relays have their rights at once."""

import secrets

from psycopg.sql import SQL, Identifier

from relay.config.settings import DatabaseSettings
from relay.operate.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of


def test_a_migration_back_and_forth_keeps_the_totals(database: DatabaseSettings, connection: Connection) -> None:
    connection.execute("""
        INSERT INTO outbox.published (node, messages) VALUES ('a', 1), ('b', 20), ('a', 300);
        INSERT INTO outbox.node (name, backend_pid, version, published_total, published_to)
            SELECT node, 1, '1', 0, 0 FROM outbox.published GROUP BY node;
        UPDATE outbox.node SET published_total = 5000, published_to = (
            SELECT min(position) FROM outbox.published WHERE node = 'a') WHERE name = 'a';
    """)
    before = description(url_of(database))

    downgrade(database, "0013")
    without = connection.execute("SELECT name, published_total FROM outbox.node ORDER BY name").fetchall()
    migrate(database)

    assert without == [("a", 5300), ("b", 20)]
    assert description(url_of(database)) == before


def test_a_role_that_writes_nodes_may_count_before_the_roles_are_made_again(
    database: DatabaseSettings, connection: Connection
) -> None:
    downgrade(database, "0013")
    relay, dashboard = (Identifier(f"{name} {secrets.token_hex(6)}") for name in ("Relay", "dashboard"))
    names = {"relay": relay, "dashboard": dashboard}
    connection.execute(
        SQL("""
            CREATE ROLE {relay};
            CREATE ROLE {dashboard};
            GRANT USAGE ON SCHEMA outbox TO {relay}, {dashboard};
            GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.node TO {relay};
            GRANT SELECT ON outbox.node TO {dashboard};
        """).format(**names)
    )
    try:
        migrate(database)
        rights = """
            SELECT array_agg(right_on ORDER BY right_on)
            FROM unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) AS named (right_on)
            WHERE has_table_privilege(%s, %s, right_on)
        """
        held = [
            connection.execute(rights, [name.as_string().strip('"'), table]).fetchone()
            for table in ("outbox.published", "outbox.lane_floor")
            for name in (relay, dashboard)
        ]
        connection.execute(SQL("SET ROLE {relay}").format(**names))
        connection.execute("INSERT INTO outbox.published (node, messages) VALUES ('a', 1)")
    finally:
        connection.execute(
            SQL("RESET ROLE; DROP OWNED BY {relay}, {dashboard}; DROP ROLE {relay}, {dashboard}").format(**names)
        )

    assert held == [
        (["DELETE", "INSERT", "SELECT"],), (["SELECT"],), (["INSERT", "SELECT", "UPDATE"],), (["SELECT"],),
    ]  # fmt: skip
