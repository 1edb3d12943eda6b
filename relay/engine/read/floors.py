"""How far each lane is read, saved for the session that holds the lane next.

Without it, a session reads a lane from the start, over every dead row that an old snapshot keeps. Under a transaction
that is open for an hour, these are tens of millions.

What is saved stays true until a relay saves again. Later rows have higher ids, or belong to transactions that were
running. A statement that makes a row pending again also makes it due, or counts its attempt.

A dump and logical replication bring it to another server, where it is not true. Ids of transactions are others there,
and the sequence may give an id again that was rolled back. So a floor says in which database it was saved.
"""

import asyncio
from collections.abc import Callable, Collection

from psycopg import AsyncConnection
from psycopg.errors import InsufficientPrivilege, UndefinedFunction
from psycopg.sql import SQL

from relay.engine.read.positions import LaneFloor
from relay.engine.read.tail import Tail
from relay.engine.session.session import LaneSession, Retry, array_text, retried

# A server keeps its number through restarts, failovers and restores of all its files. A database that is made later has
# another oid.
IDENTIFY = SQL("""
    SELECT system_identifier || '/' || pg_database.oid FROM pg_control_system(), pg_database
    WHERE datname = current_database()
""")

SAVE = SQL("""
    INSERT INTO {schema}.lane_floor AS saved (lane, floor, watermark, running, since, saved_in)
    SELECT lane, floor, %(watermark)s, %(running)s::bigint[], %(since)s::bigint[], %(database)s
    FROM unnest(%(lanes)s::smallint[], %(floors)s::bigint[]) AS read (lane, floor)
    ON CONFLICT (lane) DO UPDATE SET (floor, watermark, running, since, saved_in, saved_at)
        = (excluded.floor, excluded.watermark, excluded.running, excluded.since, excluded.saved_in, now())
""")

# A floor ends before rows that are due, or wait because they have failed. The order makes the planner read the index of
# such rows: that of the lanes has the dead rows. A sequence that stands below the watermark was set back: then ids are
# given again. No crash and no restore of a whole database does that: the log has the sequence before what is saved.
LOAD = SQL("""
    WITH waiting AS MATERIALIZED (
        SELECT lane, id
        FROM {schema}.message
        WHERE state = 'pending' AND available_at IS NOT NULL AND (available_at <= now() OR attempts > 0)
        ORDER BY available_at
    )
    SELECT lane, least(floor, (SELECT min(id) - 1 FROM waiting WHERE waiting.lane = saved.lane)), watermark, running,
        since, watermark <= (SELECT last_value - (NOT is_called)::integer FROM {schema}.message_id_seq), saved_in
    FROM {schema}.lane_floor AS saved
    WHERE lane = ANY (%(lanes)s::smallint[])
""")

SAVE_INTERVAL = 5.0  # seconds; at 30,000 rows a second the next session reads over 150,000 dead ones in 0.2 s


class Floors:
    """The floors of a session's lanes in the table `lane_floor`.

    Args:
        note_seen: called with the highest id that was given when a floor was saved, if fewer are given now.
    """

    def __init__(
        self, session: LaneSession, tail: Tail, retry: Retry, *, note_seen: Callable[[int], None] = lambda _: None
    ) -> None:
        self._session = session
        self._tail = tail
        self._retry = retry
        self._note_seen = note_seen
        self._saved: dict[int, LaneFloor] = {}
        self._database: str | None = None  # the one that this session is in, once it is known

    async def keep(self) -> None:
        """Save them at intervals, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL)
            await self.save()

    @retried
    async def save(self) -> None:
        """Save the floors if they have changed."""
        async with self._session.use() as connection:  # so no lane is given up meanwhile
            floors = self._tail.floors()
            if not floors or floors == self._saved or (database := await self._identify(connection)) is None:
                return
            read = next(iter(floors.values()))
            await connection.execute(
                self._session.sql(SAVE),
                {
                    "lanes": array_text(floors),
                    "floors": array_text(each.floor for each in floors.values()),
                    "watermark": read.watermark,
                    "running": array_text(read.running),
                    "since": array_text(read.running.values()),
                    "database": database,
                },
            )
            self._saved = floors

    @retried
    async def load(self, lanes: Collection[int]) -> dict[int, LaneFloor]:
        """Return the floors of lanes that this session has locked, and not read yet."""
        async with self._session.use() as connection:
            database = await self._identify(connection)
            cursor = await connection.execute(self._session.sql(LOAD), {"lanes": array_text(lanes)})
            floors = {}
            for lane, floor, watermark, running, since, is_given, saved_in in await cursor.fetchall():
                if not is_of(database, saved_in):
                    continue
                if is_given:
                    floors[lane] = LaneFloor(floor, watermark, dict(zip(running, since, strict=True)))
                else:
                    self._note_seen(watermark)
            return floors

    async def _identify(self, connection: AsyncConnection) -> str | None:
        """Return which database this is; None where the server does not say: then floors are neither saved nor read."""
        if self._database is None:
            try:
                cursor = await connection.execute(self._session.sql(IDENTIFY))
            except (InsufficientPrivilege, UndefinedFunction):
                return None
            ((self._database,),) = await cursor.fetchall()
        return self._database


def is_of(database: str | None, saved_in: str | None) -> bool:
    """Whether a floor was saved in this database; None as `saved_in`: before the table said it."""
    return database is not None and saved_in == database
