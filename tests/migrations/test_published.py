"""0014, 0016: what marks have counted stays in the totals when the tables go back; relays have their rights at once."""

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.migrations.earlier_roles import earlier_roles

GRANTS = """
    GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.node TO {relay};
    GRANT SELECT ON outbox.node TO {dashboard};
"""


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
    with earlier_roles(connection, GRANTS) as roles:
        migrate(database)
        counts, floors = roles.rights_on("outbox.published"), roles.rights_on("outbox.lane_floor")
        roles.become_relay()
        connection.execute("INSERT INTO outbox.published (node, messages) VALUES ('a', 1)")

    assert counts == [["DELETE", "INSERT", "SELECT"], ["SELECT"]]
    assert floors == [["INSERT", "SELECT", "UPDATE"], ["SELECT"]]
