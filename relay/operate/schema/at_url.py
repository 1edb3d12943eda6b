"""Migrate the database of a URL, from inside an application."""

from threading import Lock

from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate

ONE_AT_A_TIME = Lock()  # Alembic keeps the current migration in globals of the process


def migrate_at(url: str, schema: str) -> None:
    """Make the outbox's tables in a database, or bring them to this release, as `relay migrate` does.

    Args:
        url: as libpq takes it; its login owns the tables.
        schema: where they are.
    Raises:
        OutboxError: as `relay migrate` says it.
    """
    with ONE_AT_A_TIME:
        migrate(DatabaseSettings(url=SecretStr(url), schema_name=schema))
