"""The membership of a node: it writes heartbeats, reads the other nodes, and ends the session of a frozen node.

A node is a member while its session holds the advisory lock of its name. So a killed node is gone as soon as the server
ends its session, and no clock has to be right.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

import psycopg
from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

import relay
from relay.config.settings import RelaySettings
from relay.engine.nodes.lanes import Lanes
from relay.engine.send.broker_link import BrokerLink
from relay.engine.send.sender import Sender
from relay.engine.session.session import LANES, LaneSession, Retry, retried
from relay.logger import get_logger
from relay.runtime.backoff import until_tick, wait_for_event
from relay.runtime.health import Health
from relay.runtime.silence import Silence

log = get_logger(__name__)

JOIN = SQL("SELECT pg_try_advisory_lock(hashtext({lock}), hashtext(%(name)s))")

MEMBERS = SQL("""
    SELECT node.name, lock.pid, node.heartbeat_at, node.can_deliver, node.standby
    FROM pg_locks AS lock
    JOIN {schema}.node ON node.backend_pid = lock.pid AND hashtext(node.name)::oid = lock.objid
    WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 2 AND lock.classid = hashtext({lock})::oid
        AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")

# `published_total` grows by what the marks of this name have counted in `published` since the last heartbeat, also by
# those of a killed relay. Positions of a name commit in order. A session marks one statement after the other, and the
# next session gets the name's lock only when the server has ended this one.
# The statement also returns the members as they were just before, and which lanes are paused. One round trip is most of
# what an idle node costs.
BEAT = SQL("""
    WITH beat AS (
        INSERT INTO {schema}.node AS node (
            name, backend_pid, lanes, in_flight, state, reasons, version, can_deliver, standby
        )
        VALUES (
            %(name)s, pg_backend_pid(), %(lanes)s, %(in_flight)s, %(state)s, %(reasons)s, %(version)s, %(can_deliver)s,
            %(standby)s
        )
        ON CONFLICT (name) DO UPDATE SET
            started_at = CASE WHEN node.backend_pid = excluded.backend_pid THEN node.started_at ELSE now() END,
            backend_pid = excluded.backend_pid, heartbeat_at = now(), lanes = excluded.lanes,
            in_flight = excluded.in_flight, state = excluded.state, reasons = excluded.reasons,
            version = excluded.version, can_deliver = excluded.can_deliver, standby = excluded.standby,
            (published_total, published_to) = (
                SELECT node.published_total + coalesce(sum(messages), 0), coalesce(max(position), node.published_to)
                FROM {schema}.published AS mark
                WHERE mark.node = node.name AND mark.position > node.published_to
            )
        RETURNING name, backend_pid AS pid, heartbeat_at, can_deliver, standby
    )
    SELECT member.*, ARRAY(SELECT lane FROM {schema}.lane_pause) AS paused
    FROM (
        SELECT * FROM beat
        UNION ALL
        SELECT * FROM ({members}) AS other WHERE pid <> pg_backend_pid()
    ) AS member
""")

# For all nodes, as some never come back. Not with each heartbeat: that would walk over the deleted rows that an old
# snapshot keeps. In small parts, as marks wait meanwhile.
CLEAR_ADDED = SQL("""
    DELETE FROM {schema}.published
    WHERE ctid = ANY (ARRAY(
        SELECT mark.ctid
        FROM {schema}.node JOIN {schema}.published AS mark ON mark.node = node.name AND position <= published_to
        LIMIT %(rows)s
    ))
""")

END = SQL("""
    SELECT pg_terminate_backend(member.pid)
    FROM ({members}) AS member
    WHERE member.pid = %(pid)s AND member.heartbeat_at = %(heartbeat_at)s
""")

TELL = SQL("SELECT pg_notify({nodes}, '')")
LEAVE = SQL("SELECT pg_notify({nodes}, '') FROM pg_advisory_unlock_all() AS given_up")

JOIN_INTERVAL = 0.1  # seconds
CLEAR_INTERVAL = 60.0  # seconds
ROWS_PER_CLEAR = 20_000
ENDED_WITHIN = 0.1  # seconds that the server takes to end a session, about


class Peer(NamedTuple):
    """A relay with an open session; the fields are the columns of `membership.MEMBERS`."""

    name: str
    pid: int  # of its session's server process
    heartbeat_at: datetime
    can_deliver: bool
    standby: bool


def share(name: str, members: Iterable[Peer], lanes: int = LANES) -> int:
    """Return how many of so many lanes a node should hold when these are all members, the node included.

    The shares differ by one at most. The first of these groups that is not empty shares all lanes:

    - the nodes that can deliver and do not stand by
    - the standbys that can deliver
    - the nodes that do not stand by
    - the standbys
    """
    serving = [member.name for member in _serving(list(members))]
    if name not in serving:
        return 0
    least, more = divmod(lanes, len(serving))
    return least + (sorted(serving).index(name) < more)


def _serving(members: Sequence[Peer]) -> Sequence[Peer]:
    able = [member for member in members if member.can_deliver]
    for group in (able, members):
        if active := [member for member in group if not member.standby]:
            return active
        if group:
            return group
    return ()


class Membership:
    """The membership of one session's node.

    Args:
        former: the server process of this node's last session; the server may not have noticed its end.
    """

    def __init__(
        self,
        session: LaneSession,
        settings: RelaySettings,
        lanes: Lanes,
        *,
        sender: Sender,
        broker_link: BrokerLink,
        health: Health,
        retry: Retry,
        former: int | None,
    ) -> None:
        self._session = session
        self._settings = settings
        self._lanes = lanes
        self._sender = sender
        self._broker_link = broker_link
        self._health = health
        self._retry = retry
        self._former = former
        lock = f"{session.schema}.node"
        self._join_statement = session.sql(JOIN, lock=lock)
        members = MEMBERS.format(schema=Identifier(session.schema), lock=lock)
        self._members = session.sql(MEMBERS, lock=lock)
        self._beat_statement = session.sql(BEAT, members=members)
        self._end_statement = session.sql(END, members=members)
        self._silence = Silence(settings.node_timeout, 2 * settings.heartbeat_interval + 1)
        self._paused: frozenset[int] = frozenset()  # lanes, as of the last heartbeat
        self._could_deliver: bool | None = None  # as the other nodes know
        self._stands_by = False

    async def run(self) -> None:
        """Join, and write heartbeats until cancelled."""
        await self._join()
        while True:
            self._session.nodes_changed.clear()
            members = await self._beat()
            self._aim(share(self._settings.node, members, LANES - len(self._paused)))
            self._sender.pump()  # it may have waited for this answer
            others = [member for member in members if member.pid != self._session.pid]
            silent = self._silence.look(_beats(others), time.monotonic())
            for peer in silent:
                await self._end(peer)
            pause = ENDED_WITHIN if silent else until_tick(self._settings.heartbeat_interval)
            await wait_for_event(self._session.nodes_changed, pause)

    async def keep_clear(self) -> None:
        """Delete what marks have counted and heartbeats have added, until cancelled; one node does it for all."""
        while True:
            await asyncio.sleep(CLEAR_INTERVAL)
            while self._has_first_lane() and await self._clear_added() == ROWS_PER_CLEAR:
                pass

    def _has_first_lane(self) -> bool:
        first = min(set(range(LANES)) - self._paused, default=None)  # while all are paused, no mark is made
        return first in self._session.lanes.held

    @retried
    async def _clear_added(self) -> int:
        async with self._session.use() as connection:
            return (await connection.execute(self._session.sql(CLEAR_ADDED), {"rows": ROWS_PER_CLEAR})).rowcount

    def hurry(self) -> None:
        """Write the next heartbeat at once: something has changed here."""
        self._session.nodes_changed.set()

    async def leave(self) -> None:
        """Release the lanes to the other nodes; no row of theirs is under way."""
        self._lanes.release_all()
        await self._write_beat()  # once: a locked table must not delay the end
        async with self._session.use() as connection:
            await connection.execute(self._session.sql(LEAVE, nodes=self._session.nodes_channel))

    async def _join(self) -> None:
        """Wait until no other session has this node's name."""
        name = self._settings.node
        while not await self._is_joined():
            self._session.nodes_changed.clear()
            self._health.degrade("lanes", f"another relay has the name {name}: relay.node must be one of a kind")
            async with self._session.use() as connection:
                namesakes = [peer for peer in await self._read_peers(connection) if peer.name == name]
            silent = self._silence.look(_beats(namesakes), time.monotonic())
            for peer in namesakes:
                if peer in silent or peer.pid == self._former:
                    await self._end(peer)
            await wait_for_event(self._session.nodes_changed, JOIN_INTERVAL)
        self._health.heal("lanes")
        self._health.expect("lanes", "none held")

    async def _is_joined(self) -> bool:
        async with self._session.use() as connection:
            cursor = await connection.execute(self._join_statement, {"name": self._settings.node})
            return await cursor.fetchone() == (True,)

    @retried
    async def _beat(self) -> list[Peer]:
        return await self._write_beat()

    async def _write_beat(self) -> list[Peer]:
        """Write the node's heartbeat, and return all members, this node included."""
        can_deliver = self._broker_link.can_deliver
        values = {
            "name": self._settings.node,
            "lanes": self._session.lanes.held,
            "in_flight": self._sender.in_flight,
            "state": self._health.state,
            "reasons": self._health.reasons,
            "version": relay.__version__,
            "can_deliver": can_deliver,
            "standby": self._settings.standby,
        }
        async with self._session.write() as connection:
            cursor = await connection.execute(self._beat_statement, values, prepare=True)
            found = await cursor.fetchall()  # this node is among them
            self._paused = frozenset(found[0][-1])
            if can_deliver is not self._could_deliver:
                await connection.execute(self._session.sql(TELL, nodes=self._session.nodes_channel))
                self._could_deliver = can_deliver
        return [Peer(*row[:-1]) for row in found]

    async def _read_peers(self, connection: AsyncConnection) -> list[Peer]:
        cursor = await connection.execute(self._members, prepare=True)
        return [Peer(*row) for row in await cursor.fetchall()]

    def _aim(self, number: int) -> None:
        self._lanes.aim(number, self._paused)
        if number and self._session.lanes.held:
            self._health.heal("lanes")
        elif number:
            self._health.expect("lanes", "other nodes hold them still")
        elif len(self._paused) == LANES:
            self._health.expect("lanes", "an operator has paused them all: see `relay lanes list`")
        else:
            self._health.expect("lanes", "other nodes hold them; standing by")
        if number == 0 and not self._stands_by:
            log.info("relay.standing_by")
        elif number and self._stands_by:
            log.info("relay.serving", lanes=number)
        self._stands_by = number == 0

    async def _end(self, peer: Peer) -> None:
        """End the session of a node that is frozen or gone; then its lanes are free."""
        told = {"node": peer.name, "pid": peer.pid}
        try:
            async with self._session.use() as connection:
                values = {"pid": peer.pid, "heartbeat_at": peer.heartbeat_at}
                ended = await (await connection.execute(self._end_statement, values)).fetchone()
        except psycopg.errors.InsufficientPrivilege as error:
            log.error("node.not_ended", **told, reason=error.diag.message_primary)
        else:
            if ended:
                log.warning("node.ended", **told)


def _beats(peers: Iterable[Peer]) -> dict[tuple[int, datetime], Peer]:
    return {(peer.pid, peer.heartbeat_at): peer for peer in peers}
