"""Retries and discards of parked rows, each from its order to its end."""

import psycopg

from relay.jobs.job import Kind
from relay.operate import release
from relay.operate.parked import Selection
from relay.operate.release import Done, change_rows


def preview(connection: psycopg.Connection, schema: str, selection: Selection) -> Done:
    """Return what a retry would do."""
    return release.preview(connection, schema, Kind.RETRY, selection)


def retry(
    connection: psycopg.Connection, schema: str, selection: Selection, *, by: str | None = None, why: str | None = None
) -> Done:
    """Send rows again."""
    return change_rows(connection, schema, Kind.RETRY, selection, by=by, why=why)


def discard(connection: psycopg.Connection, schema: str, selection: Selection, *, by: str, why: str) -> Done:
    """Discard rows."""
    return change_rows(connection, schema, Kind.DISCARD, selection, by=by, why=why)
