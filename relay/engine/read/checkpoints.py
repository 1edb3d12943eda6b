"""From where a session reads each lane of the log: written behind the rows under way, and read by the next session.

A checkpoint is never the truth about a row, only a place to begin reading: receipts tell what is sent. A session begins
at its lane's last one. Without one, it reads the log from its oldest segment.
The transaction ids of a checkpoint say nothing in another cluster, for example after the tables were restored from a
dump. So the relay ignores a checkpoint of another cluster.
"""

import asyncio
from collections.abc import Callable, Mapping

from psycopg import AsyncConnection
from psycopg.sql import SQL

from relay.engine.read.log_positions import Checkpoint, Snapshot
from relay.engine.session.segments import LOWEST
from relay.engine.session.session import LaneSession, Retry, array_text, retried

NOTE_INTERVAL = 1.0  # seconds

LOAD = SQL("""
    SELECT wanted.lane, low, seen_to, unseen, position
    FROM unnest(%(lanes)s::smallint[]) AS wanted (lane)
    CROSS JOIN LATERAL (
        SELECT lows[array_position(lanes, wanted.lane)] AS low, seen_to, unseen, position
        FROM {schema}.checkpoint
        WHERE wanted.lane = ANY (lanes) AND cluster = (SELECT system_identifier FROM pg_control_system())
        ORDER BY number DESC
        LIMIT 1
    ) AS last
""")
# Appended: an UPDATE of one row would walk over its dead versions while an old snapshot is held.
NOTE = SQL("""
    WITH noted AS (
        INSERT INTO {schema}.checkpoint (cluster, lanes, lows, seen_to, unseen, position)
        SELECT system_identifier, %(lanes)s, %(lows)s, %(seen_to)s, %(unseen)s, %(base)s
        FROM pg_control_system()
        RETURNING number
    )
    DELETE FROM {schema}.checkpoint
    WHERE lanes <@ %(lanes)s::smallint[] AND number < (SELECT number FROM noted)
""")
RECEIPTS_TO = SQL("SELECT coalesce(max(block) + 1, 0) << 12 FROM {schema}.receipt")


async def load(
    session: LaneSession, connection: AsyncConnection, lanes: list[int]
) -> tuple[dict[int, Checkpoint], int]:
    """Return the last checkpoint of each lane, and an id at or below which all receipts are.

    The sessions that held the lanes before have ended: nobody adds a receipt of these lanes meanwhile.
    """
    start = Checkpoint(session.segments.start - 1, Snapshot(0, frozenset()), LOWEST)
    found = dict.fromkeys(lanes, start)
    cursor = await connection.execute(session.sql(LOAD), {"lanes": array_text(lanes)})
    for lane, low, seen_to, unseen, base in await cursor.fetchall():
        found[lane] = Checkpoint(low, Snapshot(seen_to, frozenset(unseen)), base)
    ((receipts_to,),) = await (await connection.execute(session.sql(RECEIPTS_TO))).fetchall()
    return found, receipts_to


class Checkpoints:
    """Notes where another session could go on, once a second while something moves.

    Args:
        take: returns the checkpoints of the lanes; what they speak of is committed.
    """

    def __init__(self, session: LaneSession, take: Callable[[], Mapping[int, Checkpoint]], retry: Retry) -> None:
        self._session = session
        self._take = take
        self._retry = retry
        self._noted: Mapping[int, int] = {}

    async def run(self) -> None:
        """Note checkpoints until cancelled."""
        while True:
            await asyncio.sleep(NOTE_INTERVAL)
            await self.note()

    @retried
    async def note(self) -> None:
        """Note the checkpoints if some lane has moved; lanes of one snapshot share a row."""
        found = self._take()
        lows = {lane: checkpoint.low for lane, checkpoint in found.items()}
        if lows == self._noted:
            return
        groups: dict[tuple[Snapshot, int], list[int]] = {}
        for lane, (_, seen, base) in found.items():
            groups.setdefault((seen, base), []).append(lane)
        async with self._session.write() as connection:
            for (seen, base), lanes in groups.items():
                values = {
                    "lanes": array_text(lanes),
                    "lows": array_text(lows[lane] for lane in lanes),
                    "seen_to": seen.seen_to,
                    "unseen": seen.text,
                    "base": base,
                }
                await connection.execute(self._session.sql(NOTE), values, prepare=True)
        self._noted = lows
