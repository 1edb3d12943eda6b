"""Look after the segments of the log: made ahead, cut at midnight, and counted once all lanes have passed them.

While the log is not used there are no segments, and nothing is done.
"""

import asyncio

import psycopg
from psycopg import AsyncConnection, errors
from psycopg.sql import SQL, Composed, Identifier, Literal

from relay.config.settings import DatabaseSettings
from relay.database import connect_async, one_line
from relay.errors import OutboxError
from relay.logger import get_logger
from relay.retention.drop import PREPARE

log = get_logger(__name__)

INTERVAL = 60.0  # seconds: the segments ahead last longer, also at 10,000 rows a second
AHEAD, IDS = 16, 1 << 24  # segments, and ids of each
TRIES, PAUSE = 20, 0.1  # seconds: each step waits for its locks for a moment only
RECOUNTED_AFTER = 3600.0  # seconds, while rows of a segment are not covered

IS_USED = SQL("SELECT EXISTS (SELECT FROM {schema}.segment WHERE number > 0)")
ENSURE = SQL("SELECT {schema}.ensure_segments({ahead}, {ids})")
# The segment that ids are taken from, if it has rows of yesterday and no other one has ended today.
CUT = SQL("""
    SELECT {schema}.cut_segment()
    FROM {schema}.segment, (SELECT last_value AS given FROM {schema}.message_id_seq) AS sequence
    WHERE given > first AND given < past AND (now() AT TIME ZONE 'UTC')::date > greatest(
        (made_at AT TIME ZONE 'UTC')::date,
        (SELECT max(cut_at AT TIME ZONE 'UTC')::date FROM {schema}.segment)
    )
""")
TO_COVER = SQL("""
    SELECT number FROM {schema}.segment
    WHERE cut_at IS NOT NULL AND emptied_at IS NULL AND number > 0 AND (covered_at IS NULL OR uncovered > 0)
        AND (counted_at IS NULL OR counted_at < now() - {interval} * interval '1 second')
    ORDER BY number
""")
COVER = SQL("SELECT {schema}.cover_segment({number})")


async def keep_segments(database: DatabaseSettings) -> None:
    """Look after the segments each minute, until cancelled; what fails is told, and tried again."""
    told = ""
    while True:
        await asyncio.sleep(INTERVAL)
        try:
            await look_after_segments(database)
        except (psycopg.Error, OutboxError) as error:
            if (reason := one_line(error)) != told:
                log.warning("segments.failed", reason=reason)
            told = reason
        else:
            told = ""


async def look_after_segments(database: DatabaseSettings, *, ahead: int = AHEAD, ids: int = IDS) -> None:
    """Make segments ahead, cut the one of yesterday, and count the rows of those that all lanes have passed."""
    schema = Identifier(database.schema_name)
    async with await connect_async(
        database, application_name="outbox-relay segments", target_session_attrs="read-write"
    ) as connection:
        await connection.execute(PREPARE)
        if not await _value(connection, IS_USED.format(schema=schema)):
            return
        while await _patiently(connection, ENSURE.format(schema=schema, ahead=Literal(ahead), ids=Literal(ids))):
            pass
        await _patiently(connection, CUT.format(schema=schema))
        to_cover = TO_COVER.format(schema=schema, interval=Literal(RECOUNTED_AFTER))
        for (number,) in await (await connection.execute(to_cover)).fetchall():
            missing = await _patiently(connection, COVER.format(schema=schema, number=Literal(number)))
            if missing:
                log.error("segment.uncovered", segment=number, rows=missing)


async def _patiently(connection: AsyncConnection, statement: Composed) -> object:
    """Execute a step whose lock may not be free for a while; None: it was not."""
    for _ in range(TRIES):
        try:
            return await _value(connection, statement)
        except errors.LockNotAvailable:
            await asyncio.sleep(PAUSE)
    return None


async def _value(connection: AsyncConnection, statement: Composed) -> object:
    row = await (await connection.execute(statement)).fetchone()
    return row[0] if row else None
