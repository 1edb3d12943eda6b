"""From where a session reads each lane of the log: written behind the rows under way, and read by the next session.

A checkpoint is never the truth about a row, only a place to begin reading: receipts tell what is sent. A session begins
at its lane's last one. Without one, it reads the log from its oldest segment.
The sweep of a lane has a checkpoint, too, under the number -1 - lane.

The transaction ids of a checkpoint say nothing in another cluster, for example after the tables were restored from a
dump. So the relay ignores a checkpoint of another cluster. Then the ids of the rows that are there say nothing, either.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from psycopg import AsyncConnection
from psycopg.sql import SQL

from relay.engine.read.log_positions import Checkpoint, Snapshot
from relay.engine.session.session import LaneSession, Retry, array_text, retried
from relay.logger import get_logger

log = get_logger(__name__)

NOTE_INTERVAL = 1.0  # seconds

# Before checkpoints are read: it may change them.
LEAP_OVER_SETTLED = SQL("SELECT {schema}.leap_over_settled()")
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
# A block is named whole; ids that are not given yet have no receipt.
RECEIPTS_TO = SQL("""
    SELECT least((SELECT coalesce(max(block) + 1, 0) << 12 FROM {schema}.receipt), last_value)
    FROM {schema}.message_id_seq
""")
FOREIGN_TO = SQL("""
    SELECT last_value FROM {schema}.message_id_seq
    WHERE EXISTS (
        SELECT FROM {schema}.checkpoint WHERE cluster <> (SELECT system_identifier FROM pg_control_system())
    )
""")
# Appended: an UPDATE of one row would walk over its dead versions while an old snapshot is held.
NOTE = SQL("""
    INSERT INTO {schema}.checkpoint (cluster, lanes, lows, seen_to, unseen, position)
    SELECT system_identifier, %(lanes)s, %(lows)s, %(seen_to)s, %(unseen)s, %(base)s
    FROM pg_control_system()
    RETURNING number
""")
# A checkpoint of other lanes as well stays: their next session may begin there. By number, since a search would walk
# over all dead versions. Only the first note of a session does.
DROP = SQL("DELETE FROM {schema}.checkpoint WHERE lanes <@ %(lanes)s::smallint[] AND number = ANY (%(numbers)s)")
DROP_OLD = SQL("DELETE FROM {schema}.checkpoint WHERE lanes <@ %(lanes)s::smallint[] AND number < %(first)s")


class Loaded(NamedTuple):
    """What a session must know of lanes that are new to it.

    Attributes:
        read, swept: from where to read each lane, and to sweep it.
        receipts_to: no receipt of an earlier session names an id above it.
        foreign_to: up to this id the transaction ids of rows are another cluster's.
    """

    read: dict[int, Checkpoint]
    swept: dict[int, Checkpoint]
    receipts_to: int
    foreign_to: int


def sweep_of(lane: int) -> int:
    """Return the number under which the checkpoint of a lane's sweep is kept."""
    return -1 - lane


async def load(session: LaneSession, connection: AsyncConnection, lanes: list[int]) -> Loaded:
    """Return the last checkpoints of these lanes.

    The sessions that held them before have ended: nobody adds a receipt of these lanes meanwhile.
    """
    await leap_over_settled(session, connection)
    wanted = [*lanes, *map(sweep_of, lanes)]
    found = dict.fromkeys(wanted, Checkpoint())
    cursor = await connection.execute(session.sql(LOAD), {"lanes": array_text(wanted)})
    for lane, low, seen_to, unseen, base in await cursor.fetchall():
        found[lane] = Checkpoint(low, Snapshot(seen_to, frozenset(unseen)), base)
    ((receipts_to,),) = await (await connection.execute(session.sql(RECEIPTS_TO))).fetchall()
    foreign = await (await connection.execute(session.sql(FOREIGN_TO))).fetchone()
    return Loaded(
        {lane: found[lane] for lane in lanes},
        {lane: found[sweep_of(lane)] for lane in lanes},
        receipts_to,
        foreign[0] if foreign else 0,
    )


async def leap_over_settled(session: LaneSession, connection: AsyncConnection) -> None:
    """Make the sequence leap over all ids that were given, if it was set back: none may come again."""
    cursor = await connection.execute(session.sql(LEAP_OVER_SETTLED))
    if await cursor.fetchone() == (True,):
        log.warning("ids.set_back")


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
        self._numbers: list[int] | None = None

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
        if not lows or lows == self._noted:
            return
        groups: dict[tuple[Snapshot, int], list[int]] = {}
        for lane, (_, seen, base) in found.items():
            groups.setdefault((seen, base), []).append(lane)
        lanes = array_text(found)
        async with self._session.write() as connection, connection.transaction():
            numbers = [
                await self._insert(connection, seen, base, {lane: lows[lane] for lane in of_group})
                for (seen, base), of_group in groups.items()
            ]
            if self._numbers is None:
                await connection.execute(self._session.sql(DROP_OLD), {"lanes": lanes, "first": numbers[0]})
            else:
                await connection.execute(self._session.sql(DROP), {"lanes": lanes, "numbers": self._numbers})
        self._noted, self._numbers = lows, numbers

    async def _insert(self, connection: AsyncConnection, seen: Snapshot, base: int, lows: Mapping[int, int]) -> int:
        values = {
            "lanes": array_text(lows),
            "lows": array_text(lows.values()),
            "seen_to": seen.seen_to,
            "unseen": seen.text,
            "base": base,
        }
        cursor = await connection.execute(self._session.sql(NOTE), values, prepare=True)
        ((number,),) = await cursor.fetchall()
        return int(number)
