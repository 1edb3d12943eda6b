"""0019: a job over rows in quarantine goes when the tables go back."""

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of

JOBS = """
    INSERT INTO outbox.job (kind, source, made_by, filter, state)
    VALUES ('discard', 'quarantined', 'ada', '{}', 'open'), ('discard', 'parked', 'ada', '{}', 'open')
"""


def test_a_migration_back_and_forth_drops_the_jobs_that_are_not_known_there(
    database: DatabaseSettings, connection: Connection
) -> None:
    connection.execute(JOBS)
    before = description(url_of(database))

    downgrade(database, "0018")
    left = connection.execute("SELECT source FROM outbox.job").fetchall()
    migrate(database)

    assert left == [("parked",)]
    assert description(url_of(database)) == before
