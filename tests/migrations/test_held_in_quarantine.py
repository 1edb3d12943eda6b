"""0028: rows in quarantine that wait behind others of their keys say so in a column, also those that were there."""

import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.conftest import Connection

pytestmark = pytest.mark.every_postgres

WRITTEN = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload, state, quarantine, last_error)
    VALUES ('a', 'head', '1', 'quarantined', 1, '312 NO_ROUTE'),
        ('a', 'behind', '1', 'quarantined', 1, 'waits behind message 17'),
        ('a', 'long', '1', 'quarantined', 1, 'waits behind message 99999999999999999999'),
        ('a', 'silent', '1', 'quarantined', 1, NULL),
        ('a', 'pending', '1', 'pending', NULL, 'waits behind message 18')
"""
READ = "SELECT event_type, held_behind FROM outbox.message ORDER BY id"


def test_rows_that_are_there_get_the_row_that_they_wait_for(database: DatabaseSettings, connection: Connection) -> None:
    downgrade(database, "0027")
    connection.execute(WRITTEN)

    migrate(database)

    found = connection.execute(READ).fetchall()
    assert found == [("head", None), ("behind", 17), ("long", None), ("silent", None), ("pending", None)]
    downgrade(database, "0027")
    assert {row for _, row in connection.execute(READ).fetchall()} == {None}
