"""0018: pauses end when the tables go back, and who may change a quarantine may pause at once."""

from relay.config.settings import DatabaseSettings
from relay.operate.lanes import list_lanes, pause_lane
from relay.operate.routes.pause import pause_route
from relay.operate.schema.migrate import downgrade, migrate
from relay.servers.postgres.tables import Tables
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.migrations.earlier_roles import earlier_roles

WHY = {"by": "ada", "why": "test"}
GRANTS = """
    GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.quarantine TO {relay};
    GRANT SELECT, INSERT ON outbox.operator_audit TO {relay};
    GRANT SELECT ON outbox.node TO {relay};
    GRANT SELECT ON outbox.quarantine TO {dashboard};
"""


def test_a_migration_back_and_forth_ends_pauses_and_keeps_the_routes(
    database: DatabaseSettings, connection: Connection
) -> None:
    pause_route(Tables(connection, "outbox"), "", "later", **WHY)
    pause_lane(Tables(connection, "outbox"), 7, **WHY)
    connection.execute("INSERT INTO outbox.operator_audit (command, target, done_by) VALUES ('jobs pause', '1', 'ada')")
    before = description(url_of(database))

    downgrade(database, "0017")
    audit = connection.execute("SELECT command FROM outbox.operator_audit").fetchall()
    migrate(database)

    assert audit == [("jobs pause",)]
    assert connection.execute("SELECT routing_key, paused_at FROM outbox.quarantine").fetchall() == [("later", None)]
    assert [lane.lane for lane in list_lanes(Tables(connection, "outbox")) if lane.paused_at] == []
    assert description(url_of(database)) == before


def test_a_role_that_changes_the_quarantine_may_pause_at_once(
    database: DatabaseSettings, connection: Connection
) -> None:
    downgrade(database, "0017")
    with earlier_roles(connection, GRANTS) as roles:
        migrate(database)
        held = roles.rights_on("outbox.lane_pause")
        roles.become_relay()
        paused = pause_lane(Tables(connection, "outbox"), 7, **WHY)

    assert held == [["DELETE", "INSERT", "SELECT"], ["SELECT"]]
    assert paused.paused_by == "ada"
