"""Drop old days by hand, or tell which would be dropped: what a running relay does by itself."""

import asyncio
from collections.abc import Callable, Mapping

from relay.errors import BusyError
from relay.operate.session import session
from relay.retention.day import OldDay
from relay.retention.drop import Retention
from relay.retention.kind import Kind
from relay.settings import DatabaseSettings


def drop_old_days(
    database: DatabaseSettings,
    keeps: Mapping[Kind, int],
    *,
    dry_run: bool,
    tell: Callable[[list[OldDay]], None] = lambda _: None,
) -> list[OldDay]:
    """Drop the days that are older than is kept of each kind, and give what became of each.

    Args:
        dry_run: drop nothing; give the days with their rows, and what is in the way.
        tell: called with the same before the first is dropped.
    Raises:
        BusyError: a relay drops days at this moment.
        OutboxError: as `session`.
    """

    async def run() -> list[OldDay]:
        async with Retention.open(database) as retention:
            if not dry_run and not await retention.take_lock():
                raise BusyError("another process drops old days at this moment: try again when it is done")
            old = [day for kind, keep in keeps.items() for day in await retention.old_days(kind, keep)]
            found = [await retention.look(day) for day in old]
            if dry_run:
                return found
            tell(found)
            return [await retention.drop(day) for day in found]

    with session(database):  # which finds the tables missing or behind, and has words for what the database refuses
        return asyncio.run(run())
