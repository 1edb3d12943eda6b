"""The lanes that a node holds: taken when they are free, and given up with nothing of them under way.

A node gives up a lane in this order. It stops reading the lane, and leaves to the table the rows that were not sent.
It settles and marks the rows in flight. Then it releases the lock and notifies the other nodes.
No node takes a lane that an operator has paused, and the node that has it gives it up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from psycopg.sql import SQL, Identifier, Literal

from relay.engine.read.floors import Floors
from relay.engine.read.tail import Tail
from relay.engine.send.sender import Sender
from relay.engine.session.session import LANES, LaneSession, array_text
from relay.logger import get_logger
from relay.runtime.backoff import wait_for_event
from relay.runtime.health import Health

log = get_logger(__name__)

# CASE, as a second condition might be evaluated after the lock: then a paused lane would stay locked.
LOCK = SQL("""
    SELECT lane
    FROM unnest(%(lanes)s::smallint[]) AS lane
    WHERE CASE WHEN lane = ANY (ARRAY(SELECT pause.lane FROM {pauses} AS pause)) THEN false
        ELSE pg_try_advisory_lock(hashtext({schema} || '.lane'), lane) END
    LIMIT %(number)s
""")
UNLOCK = SQL("""
    SELECT pg_notify({nodes}, '')
    FROM (
        SELECT bool_and(pg_advisory_unlock(hashtext({schema} || '.lane'), lane))
        FROM unnest(%(lanes)s::smallint[]) AS lane
    ) AS given_up
""")

LEAVING_INTERVAL = 0.01  # seconds between two looks at what is still under way


async def lock_lanes(session: LaneSession, number: int = LANES) -> list[int]:
    """Lock up to `number` free lanes that are not paused; return them. The caller adds them to `session.lanes`."""
    others = [lane for lane in range(LANES) if lane not in session.lanes.held]
    async with session.use() as connection:
        statement = LOCK.format(schema=Literal(session.schema), pauses=Identifier(session.schema, "lane_pause"))
        cursor = await connection.execute(statement, {"lanes": array_text(others), "number": number})
        return [lane for (lane,) in await cursor.fetchall()]


class Lanes:
    """Holds as many lanes as `aim` asks for. Only this class changes `session.lanes`.

    Args:
        learn: called with new lanes before they are read; it reads what other nodes have put away.
    Attributes:
        held: set once there was a lane.
    """

    def __init__(
        self,
        session: LaneSession,
        tail: Tail,
        sender: Sender,
        *,
        floors: Floors,
        health: Health,
        learn: Callable[[Collection[int]], Awaitable[None]],
    ) -> None:
        self._session = session
        self._lanes = session.lanes
        self._tail = tail
        self._sender = sender
        self._floors = floors
        self._health = health
        self._learn = learn
        self._number = 0
        self._paused: Collection[int] = ()
        self._aimed = asyncio.Event()
        self.held = asyncio.Event()

    def aim(self, number: int, paused: Collection[int]) -> None:
        """Hold this many lanes from now on, and no paused one. Call it repeatedly: a lane may have become free."""
        self._number, self._paused = number, paused
        self._aimed.set()

    def release_all(self) -> None:
        """Hold no lane from now on: no row is under way, and the session is about to unlock the lanes."""
        self._lanes.release(self._lanes.held)

    async def run(self) -> None:
        """Take and give up lanes until cancelled."""
        while True:
            self._aimed.clear()
            await self._take_or_leave()
            if self._lanes.leaving:
                await self._give_up()
            await wait_for_event(self._aimed, LEAVING_INTERVAL if self._lanes.leaving else None)

    async def _take_or_leave(self) -> None:
        # A lane that is leaving must go: the table may return rows of it again, behind rows that still wait here.
        allowed = [lane for lane in self._lanes.staying if lane not in self._paused][: self._number]
        if surplus := set(self._lanes.staying) - set(allowed):
            self._lanes.leave(surplus)
            self._tail.wake()
        if len(allowed) < self._number:
            await self._take(self._number - len(allowed))

    async def _take(self, number: int) -> None:
        taken = await lock_lanes(self._session, number)
        if taken:
            await self._learn(taken)
            floors = await self._floors.load(taken)
            self._lanes.take(taken)
            self._tail.enter(taken, floors)
            self._health.heal("lanes")
            self.held.set()
            log.info("lanes.taken", lanes=sorted(taken))

    async def _give_up(self) -> None:
        self._tail.hand_back(self._sender.give_back(self._lanes.leaving))
        async with self._session.use() as connection:  # no read is under way meanwhile
            settled = [lane for lane in self._lanes.leaving if self._tail.is_clear(lane)]
            if not settled:
                return
            names = {"schema": Literal(self._session.schema), "nodes": Literal(self._session.nodes_channel)}
            await connection.execute(UNLOCK.format(**names), {"lanes": array_text(settled)})
        self._lanes.release(settled)
        log.info("lanes.given_up", lanes=settled)
