"""The check-ins of a member: it writes into the pool's tables that it lives, and reads which partitions it holds.

It uses the connection of its inbox. Each statement is a transaction and needs no session, so a pooler may stand in
between.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, LiteralString
from uuid import UUID

from psycopg.sql import SQL, Literal

from relay.consume.apply.fence import Fence
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.failed.queues import PARTITIONS

FOUND = """
    INSERT INTO {schema}.pool (name, queue, check_in_timeout) VALUES (%(pool)s, %(queue)s, %(check_in_timeout)s)
    ON CONFLICT (name) DO UPDATE SET queue = excluded.queue, check_in_timeout = excluded.check_in_timeout
    WHERE (pool.queue, pool.check_in_timeout) IS DISTINCT FROM (excluded.queue, excluded.check_in_timeout)
"""
DIVIDE = """
    INSERT INTO {schema}.pool_partition (pool, partition) SELECT %(pool)s, generate_series(0, %(partitions)s - 1)
    ON CONFLICT DO NOTHING
"""
JOIN = """
    WITH joined AS (
        INSERT INTO {schema}.pool_member (pool, name) VALUES (%(pool)s, %(name)s) ON CONFLICT DO NOTHING
        RETURNING incarnation
    )
    SELECT incarnation, pg_notify({channel}, %(pool)s) FROM joined
"""

# A member may freeze before its COMMIT, and the master waits for the rows that are locked here. So the server ends the
# transaction of a member that is silent for the time after which it is taken for dead.
END_OF_FROZEN = "set_config('idle_in_transaction_session_timeout', {}, true)"

# A check-in need not be on disk, as the next one comes soon. A slow disk must not make members look dead.
CHECK_IN = """
    WITH settings AS (SELECT {end_of_frozen}, set_config('synchronous_commit', 'off', true)),
    here AS (
        UPDATE {schema}.pool_member
        SET checked_in_at = now(), leaving = %(leaving)s, unacknowledged = %(unacknowledged)s
        FROM settings
        WHERE pool = %(pool)s AND name = %(name)s AND incarnation = %(incarnation)s
        RETURNING pool, name
    )
    SELECT partition, epoch, wanted_by IS NOT NULL, taken_from
    FROM here LEFT JOIN {schema}.pool_partition AS held ON held.pool = here.pool AND held.member = here.name
"""
RELEASE = """
    WITH settings AS (SELECT {end_of_frozen}),
    released AS (
        UPDATE {schema}.pool_partition SET member = NULL, taken_from = NULL
        FROM settings
        WHERE pool = %(pool)s AND partition = %(partition)s AND epoch = %(epoch)s AND member = %(name)s
        RETURNING partition
    )
    SELECT pg_notify({channel}, %(pool)s) FROM released
"""
LEAVE = """
    WITH settings AS (SELECT {end_of_frozen}),
    gone AS (
        DELETE FROM {schema}.pool_member USING settings
        WHERE pool = %(pool)s AND name = %(name)s AND incarnation = %(incarnation)s
        RETURNING name
    )
    SELECT pg_notify({channel}, %(pool)s) FROM gone
"""


@dataclass(frozen=True, slots=True)
class HeldPartition:
    """A partition that the member holds, according to the tables."""

    fence: Fence
    is_wanted: bool  # by another member
    taken_from: str | None  # the former holder, if it was gone before it released the partition


class Joining(Enum):
    """The result of an attempt to join the pool."""

    JOINED = auto()
    NAME_TAKEN = auto()  # by a living member, or by a dead one that the master has not removed yet


def pool_channel(schema: str) -> str:
    """Return the name of the channel on which members notify the master."""
    return f"{schema}.pool"


class CheckIn:
    """A member's statements on the pool's tables.

    When a method raises DatabaseUnavailableError, its statement may have been done.
    """

    def __init__(self, inbox: Inbox, session: InboxSession, *, queue: str, member: str, timeout: float) -> None:
        self._inbox = inbox
        self._session = session
        self._member = member
        self._founding = {"queue": queue, "check_in_timeout": timeout, "partitions": PARTITIONS}
        self._end_of_frozen = SQL(END_OF_FROZEN).format(Literal(f"{timeout:g}s"))
        self._incarnation: UUID | None = None

    @property
    def is_member(self) -> bool:
        return self._incarnation is not None

    async def join(self) -> Joining:
        """Become a member, unless the name is taken."""
        for statement in (FOUND, DIVIDE):
            await self._run(statement, **self._founding)
        rows = await self._run(JOIN)
        if not rows:
            return Joining.NAME_TAKEN
        self._incarnation = rows[0][0]
        return Joining.JOINED

    async def check_in(self, *, leaving: bool, unacknowledged: int) -> list[HeldPartition]:
        """Report that the member lives, and return the partitions that it holds.

        If the master has removed the member, the list is empty and `is_member` is false.
        """
        rows = await self._run(CHECK_IN, leaving=leaving, unacknowledged=unacknowledged)
        if not rows:
            self._incarnation = None
        return [
            HeldPartition(Fence(partition, epoch), is_wanted, taken_from)
            for partition, epoch, is_wanted, taken_from in rows
            if partition is not None
        ]

    async def release(self, fence: Fence) -> None:
        """Release a partition; the member must have nothing of it in flight."""
        await self._run(RELEASE, partition=fence.partition, epoch=fence.epoch)

    async def leave(self) -> None:
        await self._run(LEAVE)
        self._incarnation = None

    async def _run(self, statement: LiteralString, **parameters: Any) -> list[tuple[Any, ...]]:
        names = {"pool": self._inbox.consumer_name, "name": self._member, "incarnation": self._incarnation}
        filled = self._inbox.statement(
            statement, channel=pool_channel(self._inbox.schema), end_of_frozen=self._end_of_frozen
        )
        return await self._session.run(filled, {**names, **parameters})
