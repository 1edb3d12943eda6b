"""0030: what has left the quarantine is kept, though not for long, and who may read one may read the other."""

from relay.config.settings import DatabaseSettings
from relay.operate.audit import note
from relay.operate.routes.quarantine import list_released
from relay.operate.schema.migrate import downgrade, migrate
from relay.servers.postgres.tables import Tables
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.migrations.earlier_roles import earlier_roles

ENTER = """
    INSERT INTO outbox.quarantine (exchange, routing_key, reason, probes, probed_at)
    SELECT 'billing', 'key-' || n, '312 NO_ROUTE', 3, '2026-01-01Z' FROM generate_series(1, %s) AS n
"""
LEAVE = "DELETE FROM outbox.quarantine"
GRANTS = """
    GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.quarantine TO {relay};
    GRANT SELECT ON outbox.quarantine TO {dashboard};
"""


def test_a_route_that_leaves_is_kept_and_the_oldest_are_forgotten(connection: Connection) -> None:
    connection.execute(ENTER, [1])
    connection.execute(LEAVE)
    (first,) = list_released(Tables(connection, "outbox"), limit=10)
    connection.execute(ENTER, [1000])
    connection.execute(LEAVE)
    kept = list_released(Tables(connection, "outbox"), limit=2000)

    assert (first.exchange, first.routing_key, first.reason, first.probes) == ("billing", "key-1", "312 NO_ROUTE", 3)
    assert first.released_at > first.since
    assert len(kept) == 1000
    assert first.id not in {each.id for each in kept}


def test_a_relay_releases_whatever_is_there(connection: Connection) -> None:
    connection.execute(ENTER, [1])
    connection.execute(LEAVE)
    connection.execute("SELECT setval(pg_get_serial_sequence('outbox.quarantine', 'id'), 1, false)")  # as by a restore
    connection.execute(ENTER, [1])

    assert connection.execute(LEAVE).rowcount == 1
    assert [each.id for each in list_released(Tables(connection, "outbox"), limit=10)] == [1, 1]


def test_a_migration_back_and_forth_forgets_what_was_kept(database: DatabaseSettings, connection: Connection) -> None:
    note(Tables(connection, "outbox"), "topology apply", "binding a -> b", by="ada", why=None)
    note(Tables(connection, "outbox"), "jobs pause", "1", by="ada", why=None)
    before = description(url_of(database))

    downgrade(database, "0029")
    audit = connection.execute("SELECT command FROM outbox.operator_audit").fetchall()
    migrate(database)

    assert audit == [("jobs pause",)]
    assert description(url_of(database)) == before


def test_a_role_that_reads_the_quarantine_reads_what_left_it(
    database: DatabaseSettings, connection: Connection
) -> None:
    downgrade(database, "0029")
    with earlier_roles(connection, GRANTS) as roles:
        migrate(database)
        held = roles.rights_on("outbox.quarantine_released")
        roles.become_relay()
        connection.execute(ENTER, [1])
        connection.execute(LEAVE)

        assert held == [["SELECT"], ["SELECT"]]
        assert len(list_released(Tables(connection, "outbox"), limit=10)) == 1
