"""Old days by hand: which would be dropped, and their drop, which a running relay does by itself."""

import asyncio
from collections.abc import Callable, Mapping

import psycopg
from psycopg.sql import SQL, Identifier

from relay.config.settings import DatabaseSettings
from relay.errors import BusyError
from relay.operate.session import session
from relay.retention.day import Fate, OldDay
from relay.retention.drop import Retention
from relay.retention.kind import Kind

NOTE = SQL("""
    INSERT INTO {schema}.operator_audit (command, target, done_by, why)
    SELECT 'retention', given.name, %(by)s, %(why)s FROM unnest(%(tables)s::text[]) AS given (name)
""")


def look_at_old_days(database: DatabaseSettings, keeps: Mapping[Kind, int]) -> list[OldDay]:
    """Return the days that are older than is kept of each kind, with their rows, and what is in the way.

    Raises:
        OutboxError: as `session`.
    """

    async def run() -> list[OldDay]:
        async with Retention.open(database) as retention:
            return await _found(retention, keeps)

    with session(database):  # which finds the tables missing or behind, and has words for what the database refuses
        return asyncio.run(run())


def drop_old_days(
    database: DatabaseSettings,
    keeps: Mapping[Kind, int],
    *,
    by: str,
    why: str,
    tell: Callable[[list[OldDay]], None] = lambda _: None,
) -> list[OldDay]:
    """Drop the days that are older than is kept of each kind, and return what became of each.

    Before a day is dropped, a row in the table `operator_audit` names it, with who drops it and why.

    Args:
        tell: called with what `look_at_old_days` returns before the first is dropped.
    Raises:
        BusyError: a relay drops days at this moment.
        OutboxError: as `session`.
    """

    def note(connection: psycopg.Connection, tables: list[str]) -> None:
        statement = NOTE.format(schema=Identifier(database.schema_name))
        connection.execute(statement, {"by": by, "why": why, "tables": tables})

    async def run(connection: psycopg.Connection) -> list[OldDay]:
        async with Retention.open(database) as retention:
            if not await retention.take_lock():
                raise BusyError("another process drops old days at this moment: try again when it is done")
            found = await _found(retention, keeps)
            tell(found)
            note(connection, [day.table for day in found if day.fate is Fate.OLD])
            done = [await retention.drop(day) for day in found]
            if any(isinstance(day.part, int) for day in found):
                await retention.drop_emptied()
            return done

    with session(database) as connection:
        return asyncio.run(run(connection))


async def _found(retention: Retention, keeps: Mapping[Kind, int]) -> list[OldDay]:
    old = [day for kind, keep in keeps.items() for day in await retention.old_days(kind, keep)]
    return [await retention.look(day) for day in old]
