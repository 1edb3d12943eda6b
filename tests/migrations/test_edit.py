"""0031: a role that may change parked rows may send edited copies, and the audit takes what it took before."""

import pytest
from alembic.script import ScriptDirectory

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from relay.servers.postgres.compatibility import SCRIPTS
from tests.migrations.conftest import Connection
from tests.support.roles import granted_roles

DOWN = str(ScriptDirectory(str(SCRIPTS)).get_revision("0031").down_revision)

pytestmark = pytest.mark.every_postgres

TAKEN = """
    SELECT pg_get_constraintdef(oid) FROM pg_constraint
    WHERE conrelid = 'outbox.operator_audit'::regclass AND conname = 'operator_audit_command'
"""
MAY = """
    SELECT rolname::text FROM pg_roles WHERE rolname LIKE 'outbox_%' AND has_function_privilege(
        oid, 'outbox.send_edited(bigint, uuid, json, bytea, jsonb, text, text)', 'EXECUTE') ORDER BY 1
"""
NOTE = "INSERT INTO outbox.operator_audit (command, target, done_by) VALUES (%s, '1', 'ada')"


def test_the_audit_takes_one_command_more_and_on_the_way_back_one_less(
    database: DatabaseSettings, connection: Connection
) -> None:
    before = connection.execute(TAKEN).fetchone()
    connection.execute(NOTE, ["parked edit"])

    downgrade(database, DOWN)
    without = str(connection.execute(TAKEN).fetchone())
    connection.execute(NOTE, ["lanes pause"])
    migrate(database)

    assert "parked edit" not in without
    assert "lanes pause" in without
    assert connection.execute(TAKEN).fetchone() == before
    assert connection.execute("SELECT command FROM outbox.operator_audit").fetchall() == [("lanes pause",)]


def test_roles_that_change_parked_rows_send_edited_ones(database: DatabaseSettings, connection: Connection) -> None:
    with granted_roles(connection):
        granted = connection.execute(MAY).fetchall()
        downgrade(database, DOWN)
        migrate(database)

        assert connection.execute(MAY).fetchall() == granted == [("outbox_console",), ("outbox_relay",)]
