"""Old days by hand: which would be dropped, and their drop, which a running relay does by itself.

Each function that asks the database runs an event loop, so a coroutine calls it in a thread.
"""

import asyncio
from collections.abc import Callable, Mapping

from psycopg.sql import SQL

from relay.config.settings import DatabaseSettings, RelaySettings, days_kept
from relay.errors import BusyError, UsageError
from relay.operate.audit import note
from relay.operate.session import session
from relay.retention.day import Fate, OldDay
from relay.retention.drop import Retention
from relay.retention.kind import INBOX, DatedTable, kept_days, kept_failures
from relay.servers.postgres.tables import Tables

NOTE = SQL("""
    INSERT INTO {schema}.operator_audit (command, target, done_by, why)
    SELECT 'retention', given.name, %(by)s, %(why)s FROM unnest(%(tables)s::text[]) AS given (name)
""")
BUSY = "another process drops old days at this moment: try again when it is done"


def keeps_of(relay: RelaySettings, keep: str | None, keep_inbox: str | None) -> dict[DatedTable, int]:
    """Return for how many days each kind of row is kept, without those that are kept without end.

    Args:
        keep, keep_inbox: in place of what the settings say.
    Raises:
        UsageError: one of them cannot be.
    """
    given = {"retention": ("--keep", keep), "inbox_retention": ("--keep-inbox", keep_inbox)}
    keeps = kept_days(
        relay.model_copy(update={name: _days(flag, text) for name, (flag, text) in given.items() if text is not None})
    )
    if keep_inbox is not None and keeps.get(INBOX) != days_kept(keep_inbox):
        raise UsageError(
            f"--keep-inbox {keep_inbox!r} is less than sent rows are kept: a replay of them would meet an inbox"
            " that has forgotten what was applied"
        )
    return keeps


def _days(flag: str, keep: str) -> str:
    """Return the text, which `days_kept` can read.

    Raises:
        UsageError: it cannot.
    """
    try:
        days_kept(keep)
    except ValueError:
        raise UsageError(
            f'{flag} takes days as in "30 days" or "30d", from 1 to 99999, or "off"; not {keep!r}'
        ) from None
    return keep


def look_at_old_days(database: DatabaseSettings, keeps: Mapping[DatedTable, int]) -> list[OldDay]:
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
    keeps: Mapping[DatedTable, int],
    *,
    by: str,
    why: str,
    tell: Callable[[list[OldDay]], None] = lambda _: None,
) -> list[OldDay]:
    """Drop the days that are older than is kept of each kind, and return what became of each.

    Causes of failures are kept as long as sent rows.

    Before a day is dropped, a row in the table `operator_audit` names it, with who drops it and why.

    Args:
        tell: called with what `look_at_old_days` returns before the first is dropped.
    Raises:
        BusyError: a relay drops days at this moment.
        OutboxError: as `session`.
    """

    async def run(tables: Tables) -> list[OldDay]:
        async with Retention.open(database) as retention:
            if not await retention.take_lock():
                raise BusyError(BUSY)
            found = await _found(retention, keeps)
            tell(found)
            old = [day.table for day in found if day.fate is Fate.OLD]
            tables.execute(NOTE, {"by": by, "why": why, "tables": old})
            done = [await retention.drop(day) for day in found]
            if (keep := kept_failures(keeps)) is not None:
                await retention.forget_failures(keep)
            return done

    with session(database) as tables:
        return asyncio.run(run(tables))


def keep_batches_of(relay: RelaySettings, keep: str | None) -> int | None:
    """Return for how many days names of Spark's batches are kept; None: without end.

    Args:
        keep: in place of what the settings say.
    Raises:
        UsageError: it cannot be.
    """
    return relay.batch_retention_days if keep is None else days_kept(_days("--keep-batches", keep))


def count_old_batches(database: DatabaseSettings, keep: int) -> int:
    """Return how many names of batches `forget_batches` would delete.

    Raises:
        OutboxError: as `session`.
    """

    async def run() -> int:
        async with Retention.open(database) as retention:
            return await retention.old_batches(keep)

    with session(database):
        return asyncio.run(run())


def forget_batches(database: DatabaseSettings, keep: int, *, by: str, why: str) -> int:
    """Delete the names of Spark's batches that ended `keep` days ago or before; return their number.

    The newest committed one of each application stays, and so does what is begun and has not ended.

    Raises:
        BusyError: a relay drops days at this moment.
        OutboxError: as `session`.
    """

    async def run(tables: Tables) -> int:
        async with Retention.open(database) as retention:
            if not await retention.take_lock():
                raise BusyError(BUSY)
            note(tables, "retention", "batch", by=by, why=why)
            return await retention.forget_batches(keep)

    with session(database) as tables:
        return asyncio.run(run(tables))


async def _found(retention: Retention, keeps: Mapping[DatedTable, int]) -> list[OldDay]:
    old = [day for kind, keep in keeps.items() for day in await retention.old_days(kind, keep)]
    return [await retention.look(day) for day in old]
