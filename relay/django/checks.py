"""What `manage.py check` says of the outbox; with `--database` also what the database has, and what its login may do.

The findings of a database are warnings: `manage.py migrate` runs these checks first, and errors would keep it from
making the tables.
"""

from collections.abc import Sequence
from typing import Any

import psycopg
from django.apps import apps
from django.core import checks
from django.db import DatabaseError, connections

from relay.django import where
from relay.django.tables import OutboxFound, read_outbox
from relay.servers.postgres.compatibility import release_needed

MAKE = "add a migration with relay.django.Migrate(), or run `relay migrate`"


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Check that the outbox's database is one that `add` can write to; connects to no server."""
    alias = where.alias()
    if alias not in connections.settings:
        problem = f"OUTBOX_RELAY_DATABASE is {alias!r}, which DATABASES does not have."
        hint = f"Take one of {', '.join(sorted(connections.settings))}."
        return [checks.Error(problem, hint=hint, id="outbox_relay.E001")]
    if not _is_usable(alias):
        found = connections[alias].display_name
        problem = f"Database {alias!r} is {found}: the outbox needs PostgreSQL with psycopg 3."
        hint = "Set its ENGINE to django.db.backends.postgresql, or name another one as OUTBOX_RELAY_DATABASE."
        return [checks.Error(problem, hint=hint, id="outbox_relay.E002")]
    return []


def check_tables(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Check that the tables are there and fit this release, and that the login may write."""
    alias, schema = where.alias(), where.schema()
    if alias not in (databases or ()) or alias not in connections.settings or not _is_usable(alias):
        return []
    try:
        found = read_outbox(connections[alias], schema)
    except DatabaseError as error:
        problem = f"The outbox of database {alias!r} cannot be checked: {str(error).partition(chr(10))[0]}"
        return [checks.Warning(problem, id="outbox_relay.W001")]
    if found is None:
        problem = f"Database {alias!r} has no outbox in schema {schema!r}."
        return [checks.Warning(problem, hint=f"To make its tables, {MAKE}.", id="outbox_relay.W002")]
    return _of_tables(alias, schema, found)


def _of_tables(alias: str, schema: str, found: OutboxFound) -> list[checks.CheckMessage]:
    quote = connections[alias].ops.quote_name
    if needed := release_needed(found.note):
        problem = f"The outbox of database {alias!r} needs release {needed} of outbox-relay or a later one."
        return [checks.Warning(problem, hint=f'pip install "outbox-relay>={needed}"', id="outbox_relay.W003")]
    if found.missing:
        problem = f"The outbox of database {alias!r} is of an earlier release: it lacks {', '.join(found.missing)}."
        return [checks.Warning(problem, hint=f"To bring it to this release, {MAKE}.", id="outbox_relay.W004")]
    if not found.may_write:
        problem = f"Login {found.login!r} of database {alias!r} may not write events into schema {schema!r}."
        hint = f"`relay config roles` makes the role; then GRANT {schema}_writer TO {quote(found.login)}."
        return [checks.Warning(problem, hint=hint, id="outbox_relay.W005")]
    if apps.is_installed("django.contrib.admin") and not found.may_read:
        problem = f"Login {found.login!r} of database {alias!r} may not read messages: the admin shows them to nobody."
        tables = ", ".join(f"{quote(schema)}.{name}" for name in ("message", "message_state"))
        return [checks.Info(problem, hint=f"GRANT SELECT ON {tables} TO {quote(found.login)}.", id="outbox_relay.I001")]
    return []


def _is_usable(alias: str) -> bool:
    connection = connections[alias]
    return connection.vendor == "postgresql" and connection.Database is psycopg
