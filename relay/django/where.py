"""Where a project has the outbox, by its settings."""

from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS
from psycopg.conninfo import make_conninfo


def alias() -> str:
    """Return the alias of the database."""
    return str(getattr(settings, "OUTBOX_RELAY_DATABASE", DEFAULT_DB_ALIAS))


def schema() -> str:
    """Return the schema of the tables."""
    return str(getattr(settings, "OUTBOX_RELAY_SCHEMA", "outbox"))


def url_of(database: Any) -> str:
    """Return how libpq connects to the database of a Django connection, with its password."""
    database.ensure_connection()
    info = database.connection.info
    return make_conninfo(info.dsn, password=info.password or None)
