"""Retries and discards of parked rows, each from its order to its end."""

import asyncio
from collections.abc import Callable

import psycopg

from relay.jobs.job import Kind
from relay.operate.parked import change as release
from relay.operate.parked.change import Done, change_rows
from relay.operate.parked.read import Selection


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


async def operate(database_url: str, change: Callable[[psycopg.Connection], Done]) -> Done:
    """Do this on a session of an operator, while a relay runs in this process."""

    def run() -> Done:
        with psycopg.connect(database_url, autocommit=True) as connection:
            return change(connection)

    return await asyncio.to_thread(run)
