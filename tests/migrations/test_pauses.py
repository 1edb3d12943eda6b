"""0018: pauses end when the tables go back, and who may change a quarantine may pause at once."""

import secrets

from psycopg.sql import SQL, Identifier

from relay.config.settings import DatabaseSettings
from relay.operate.migrate import downgrade, migrate
from relay.operate.pauses import list_lanes, pause_lane, pause_route
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of

WHY = {"by": "ada", "why": "test"}


def test_a_migration_back_and_forth_ends_pauses_and_keeps_the_routes(
    database: DatabaseSettings, connection: Connection
) -> None:
    pause_route(connection, "outbox", "", "later", **WHY)
    pause_lane(connection, "outbox", 7, **WHY)
    connection.execute("INSERT INTO outbox.operator_audit (command, target, done_by) VALUES ('jobs pause', '1', 'ada')")
    before = description(url_of(database))

    downgrade(database, "0017")
    audit = connection.execute("SELECT command FROM outbox.operator_audit").fetchall()
    migrate(database)

    assert audit == [("jobs pause",)]
    assert connection.execute("SELECT routing_key, paused_at FROM outbox.quarantine").fetchall() == [("later", None)]
    assert [lane.lane for lane in list_lanes(connection, "outbox") if lane.paused_at] == []
    assert description(url_of(database)) == before


def test_a_role_that_changes_the_quarantine_may_pause_at_once(
    database: DatabaseSettings, connection: Connection
) -> None:
    downgrade(database, "0017")
    relay, dashboard = (Identifier(f"{name} {secrets.token_hex(6)}") for name in ("Relay", "dashboard"))
    names = {"relay": relay, "dashboard": dashboard}
    connection.execute(
        SQL("""
            CREATE ROLE {relay};
            CREATE ROLE {dashboard};
            GRANT USAGE ON SCHEMA outbox TO {relay}, {dashboard};
            GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.quarantine TO {relay};
            GRANT SELECT, INSERT ON outbox.operator_audit TO {relay};
            GRANT SELECT ON outbox.node TO {relay};
            GRANT SELECT ON outbox.quarantine TO {dashboard};
        """).format(**names)
    )
    try:
        migrate(database)
        rights = """
            SELECT array_agg(right_on ORDER BY right_on)
            FROM unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[]) AS named (right_on)
            WHERE has_table_privilege(%s, 'outbox.lane_pause', right_on)
        """
        held = [connection.execute(rights, [name.as_string().strip('"')]).fetchone() for name in (relay, dashboard)]
        connection.execute(SQL("SET ROLE {relay}").format(**names))
        paused = pause_lane(connection, "outbox", 7, **WHY)
    finally:
        connection.execute(
            SQL("RESET ROLE; DROP OWNED BY {relay}, {dashboard}; DROP ROLE {relay}, {dashboard}").format(**names)
        )

    assert held == [(["DELETE", "INSERT", "SELECT"],), (["SELECT"],)]
    assert paused.paused_by == "ada"
