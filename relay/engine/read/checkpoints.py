"""From where a session reads each lane of the log: written behind the rows under way, and read by the next session.

A checkpoint is never the truth about a row, only a place to begin reading: receipts tell what is sent. A session begins
at its lane's last one. Without one, it reads the log from its oldest segment.
The transaction ids of a checkpoint say nothing in another cluster, for example after the tables were restored from a
dump. So the relay ignores a checkpoint of another cluster.
"""

from psycopg import AsyncConnection
from psycopg.sql import SQL

from relay.engine.read.log_positions import Checkpoint, Snapshot
from relay.engine.session.segments import LOWEST
from relay.engine.session.session import LaneSession, array_text

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
