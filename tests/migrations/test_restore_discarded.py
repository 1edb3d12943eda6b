"""0032: a job over discarded rows goes when the tables go back, and the others stay."""

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of

JOBS = """
    INSERT INTO outbox.job (kind, source, made_by, filter, state)
    VALUES ('restore', 'discarded', 'ada', '{}', 'open'), ('restore', 'archived', 'ada', '{}', 'open')
"""


def test_a_migration_back_and_forth_drops_the_jobs_that_are_not_known_there(
    database: DatabaseSettings, connection: Connection
) -> None:
    connection.execute(JOBS)
    before = description(url_of(database))

    downgrade(database, "0031")
    left = connection.execute("SELECT source FROM outbox.job").fetchall()
    migrate(database)

    assert left == [("archived",)]
    assert description(url_of(database)) == before
