"""Where a project has the outbox, by its settings."""

import re
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS
from psycopg.conninfo import conninfo_to_dict, make_conninfo

SPECIAL = re.compile(r"[\s\\]")  # in libpq's `options`


def alias() -> str:
    """Return the alias of the database."""
    return str(getattr(settings, "OUTBOX_RELAY_DATABASE", DEFAULT_DB_ALIAS))


def schema() -> str:
    """Return the schema of the tables."""
    return str(getattr(settings, "OUTBOX_RELAY_SCHEMA", "outbox"))


def url_of(database: Any) -> str:
    """Return how libpq connects to the database of a Django connection, with its password, as the same role."""
    database.ensure_connection()
    info = database.connection.info
    given: dict[str, Any] = conninfo_to_dict(info.dsn)
    if info.password:
        given["password"] = info.password
    if role := database.settings_dict["OPTIONS"].get("assume_role"):
        words = SPECIAL.sub(r"\\\g<0>", role)
        given["options"] = f"{given.get('options', '')} -c role={words}".strip()
    return make_conninfo(**given)
