"""The master of the pools: it notices members that have fallen silent, and gives every partition to a living member.

One of all candidates is the master, while its session holds an advisory lock. All its state is in the tables, where the
next master finds it.
"""

import time
from collections import defaultdict
from collections.abc import Sequence

import psycopg
from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier, Literal

from relay.consume.apply.fence import lock_space
from relay.consume.pool.assignment import Assigned, changes
from relay.consume.pool.tables import Member, Pool, read_pools
from relay.logger import get_logger
from relay.runtime.silence import Silence

LOOKS = 8  # within the time-out of a member
IDLE_INTERVAL = 1.0  # seconds between two looks when there is no member
BEAT_INTERVAL = 0.5
LOCK_TIMEOUT = "1s"

BEAT = SQL("UPDATE {schema}.pool_master SET seen_at = now()")

# The member may have checked in since the master looked; then it stays.
REMOVE = SQL("""
    DELETE FROM {schema}.pool_member
    WHERE pool = %(pool)s AND name = %(name)s AND incarnation = %(incarnation)s AND checked_in_at = %(checked_in_at)s
""")

# The holder may have released the partition since the master looked; then the next look finds it free.
CHANGE = SQL("""
    UPDATE {schema}.pool_partition
    SET epoch = %(epoch)s, member = %(member)s, wanted_by = %(wanted_by)s,
        taken_from = CASE WHEN %(is_gone)s THEN member ELSE taken_from END,
        since = CASE WHEN epoch = %(epoch)s THEN since ELSE now() END
    WHERE pool = %(pool)s AND partition = %(partition)s
        AND epoch = %(old_epoch)s AND member IS NOT DISTINCT FROM %(old_member)s
""")

# Ends the sessions that are within the fence of one of these partitions (`relay.consume.apply.fence`).
END = SQL("""
    SELECT pid, pg_terminate_backend(pid)
    FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 2 AND classid = ({space})::oid AND objid = ANY(%(partitions)s::oid[])
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")

log = get_logger("relay.pool")


class Master:
    """Works on one session, which holds the lock."""

    def __init__(self, connection: AsyncConnection, schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._silences: dict[str, Silence] = {}
        self._known: dict[str, set[str]] | None = None  # members by pool, as of the last look
        self._beat_at = 0.0

    @property
    def has_members(self) -> bool:
        """Whether any pool had a member at the last look."""
        return self._known is not None and any(self._known.values())

    async def look(self) -> float:
        """Look at all pools, move their partitions as needed, and return after how many seconds to look again."""
        pools = await read_pools(self._connection, self._schema)
        self._tell_members(pools)
        for pool in pools:
            await self._see_to(pool)
        if not any(pool.members for pool in pools):
            return IDLE_INTERVAL
        await self._beat()
        return min(pool.check_in_timeout for pool in pools if pool.members) / LOOKS

    async def _beat(self) -> None:
        """Let the other candidates see that this master is not frozen."""
        if time.monotonic() - self._beat_at < BEAT_INTERVAL:
            return
        async with self._connection.transaction():
            await self._connection.execute("SET LOCAL synchronous_commit = off")
            await self._connection.execute(BEAT.format(schema=Identifier(self._schema)))
        self._beat_at = time.monotonic()

    def _tell_members(self, pools: Sequence[Pool]) -> None:
        now = {pool.name: {member.name for member in pool.members} for pool in pools}
        if self._known is None:
            counts = {pool: sorted(members) for pool, members in now.items() if members}
            log.info("pool.master_assumed", pools=counts)
        else:
            for pool, members in now.items():
                for name in sorted(members - self._known.get(pool, set())):
                    log.info("pool.member_added", pool=pool, member=name)
                for name in sorted(self._known.get(pool, set()) - members):
                    log.info("pool.member_removed", pool=pool, member=name, reason="left")
        self._known = now

    async def _see_to(self, pool: Pool) -> None:
        timeout = pool.check_in_timeout
        silence = self._silences.setdefault(pool.name, Silence(timeout, timeout / 2))
        beats = {(member.incarnation, member.checked_in_at): member for member in pool.members}
        silent = silence.look(beats, time.monotonic())
        members = {member.name for member in pool.members if member not in silent}
        serving = {member.name for member in pool.members if member not in silent and not member.leaving}
        partitions = [each.assigned for each in pool.partitions]
        changed = changes(partitions, members, serving)
        if not silent and not changed:
            return
        await self._end_sessions(pool, silent)
        try:
            await self._change(pool, silent=silent, members=members, partitions=partitions, changed=changed)
        except psycopg.errors.LockNotAvailable:
            # A member that is taken for dead is still in a transaction: its partition waits until that has ended.
            log.warning("pool.partitions_locked", pool=pool.name, members=[member.name for member in silent])

    async def _end_sessions(self, pool: Pool, silent: Sequence[Member]) -> None:
        """End the sessions of members that are gone: the transaction of a frozen one would hold up its successors."""
        names = {member.name for member in silent}
        held = [each.assigned.partition for each in pool.partitions if each.assigned.member in names]
        if not held:
            return
        try:
            await self._connection.execute(
                END.format(space=lock_space(self._schema, pool.name)), {"partitions": [str(each) for each in held]}
            )
        except psycopg.errors.InsufficientPrivilege as error:
            log.error("pool.member_not_ended", pool=pool.name, members=sorted(names), reason=error.diag.message_primary)

    async def _change(
        self,
        pool: Pool,
        *,
        silent: Sequence[Member],
        members: set[str],
        partitions: Sequence[Assigned],
        changed: Sequence[Assigned],
    ) -> None:
        old = {each.partition: each for each in partitions}
        done = []
        is_committed = False
        names = Identifier(self._schema)
        async with self._connection.transaction():
            await self._connection.execute(SQL("SET LOCAL lock_timeout = {}").format(Literal(LOCK_TIMEOUT)))
            for member in silent:
                row = {"pool": pool.name, "name": member.name, "incarnation": member.incarnation}
                cursor = await self._connection.execute(
                    REMOVE.format(schema=names), {**row, "checked_in_at": member.checked_in_at}
                )
                if not cursor.rowcount:  # the member lives: give up this change, and let the next look decide
                    raise psycopg.Rollback
            for each in changed:
                before = old[each.partition]
                row = {
                    "pool": pool.name,
                    "partition": each.partition,
                    "epoch": each.epoch,
                    "member": each.member,
                    "wanted_by": each.wanted_by,
                    "old_epoch": before.epoch,
                    "old_member": before.member,
                    "is_gone": before.member is not None and before.member not in members,
                }
                cursor = await self._connection.execute(CHANGE.format(schema=names), row)
                done += [each] * cursor.rowcount
            is_committed = True
        if is_committed:
            self._tell(pool, old, silent, done)

    def _tell(
        self, pool: Pool, old: dict[int, Assigned], removed: Sequence[Member], changed: Sequence[Assigned]
    ) -> None:
        for member in removed:
            reason = f"no check-in within {pool.check_in_timeout:g} s"
            log.warning("pool.member_removed", pool=pool.name, member=member.name, reason=reason)
            if self._known is not None:
                self._known[pool.name].discard(member.name)
        assigned, wanted = defaultdict(list), defaultdict(list)
        for each in changed:
            if each.member is not None and each.epoch != old[each.partition].epoch:
                assigned[each.member].append(each.partition)
            elif each.wanted_by is not None:
                wanted[each.wanted_by].append(each.partition)
        if assigned:
            log.info("pool.partitions_assigned", pool=pool.name, partitions=dict(assigned))
        if wanted:
            log.info("pool.partitions_wanted", pool=pool.name, partitions=dict(wanted))
