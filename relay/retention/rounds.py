"""Rounds over the old days, now and then, next to the engine."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping

import psycopg

from relay.config.settings import DatabaseSettings, Settings
from relay.errors import OutboxError
from relay.logger import get_logger
from relay.retention.day import Fate
from relay.retention.drop import Retention
from relay.retention.kind import DatedTable, kept_days, kept_failures
from relay.servers.postgres.database import one_line

log = get_logger(__name__)

FIRST_AFTER, INTERVAL = 180.0, 3600.0  # seconds: a start has other things to do, and days are in no hurry


async def keep_days(settings: Settings) -> None:
    """Drop old days now and then, for as long as the node runs; what fails is logged, and tried again."""
    keeps, keep_batches = kept_days(settings.relay), settings.relay.batch_retention_days
    if not keeps and keep_batches is None:
        return
    await asyncio.sleep(FIRST_AFTER)
    while True:
        try:
            await drop_old_days(settings.database, keeps, keep_batches)
        except (psycopg.Error, OutboxError) as error:
            log.warning("retention.failed", reason=one_line(error))
        await asyncio.sleep(INTERVAL)


async def drop_old_days(
    database: DatabaseSettings, keeps: Mapping[DatedTable, int], keep_batches: int | None = None
) -> None:
    """Go once over the days that are older than is kept of each kind, and log what becomes of each.

    Causes of failures are kept as long as sent rows, names of Spark's batches for `keep_batches` days.

    While another process does so, nothing is done.
    """
    postponed: dict[tuple[str, str], list[str]] = defaultdict(list)
    async with Retention.open(database) as retention:
        if not await retention.take_lock():
            return
        old = [day for kind, keep in keeps.items() for day in await retention.old_days(kind, keep)]
        for day in old:
            started = time.monotonic()
            done = await retention.drop(day)
            date, table = str(done.day), done.kind.parent
            if done.fate is Fate.POSTPONED:
                postponed[table, done.reason].append(date)
            else:
                seconds = round(time.monotonic() - started, 1)
                log.info("retention.dropped", table=table, day=date, rows=done.rows, bytes=done.bytes, seconds=seconds)
        keep = kept_failures(keeps)
        if keep is not None and (forgotten := await retention.forget_failures(keep)):
            log.info("retention.failures_forgotten", causes=forgotten)
        if keep_batches is not None and (forgotten := await retention.forget_batches(keep_batches)):
            log.info("retention.batches_forgotten", batches=forgotten)
    for (table, reason), days in postponed.items():
        log.warning("retention.postponed", table=table, days=days, reason=reason)
