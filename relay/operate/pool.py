"""How the pools are doing: members, and for each partition its holder, epoch and lag."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from pydantic import Field

from relay.config.settings import Settings
from relay.consume.failed.queues import dead_queue_name, partition_queue_name, partition_queue_names
from relay.consume.pool.tables import Pool, read_master, read_pools
from relay.consume.queue_depth import ready_count
from relay.errors import BrokerUnavailableError, NotFoundError
from relay.operate.asked import Closed, Text
from relay.operate.operation import Role, Servers, operation
from relay.operate.runbooks import Guided, Runbook
from relay.servers.postgres.bounded_values import bound_values
from relay.servers.postgres.database import connect_async
from relay.servers.rabbitmq.connection import Connection, connect

LAGGING = 10_000  # messages that wait in a queue, from which on it is a reason
NO_MASTER = Guided("no master: start `relay run` or `relay pool run` on this database", Runbook.CONSUMER_DOWN)


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """A partition; `ready` messages wait in its queue, and nobody knows how many when the broker does not answer."""

    partition: int
    queue: str
    epoch: int
    member: str | None
    wanted_by: str | None
    taken_from: str | None
    since: datetime
    ready: int | None


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member, which is late when it should have checked in by now."""

    name: str
    partitions: list[int]
    unacknowledged: int
    leaving: bool
    late: bool
    last_check_in: datetime
    check_in_age_s: float
    joined_at: datetime


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One pool; the field names are the keys of the JSON."""

    name: str
    queue: str
    check_in_timeout: float
    members: list[MemberStatus]
    partitions: list[PartitionStatus]
    dead_letters: int | None  # None: nobody knows


@dataclass(frozen=True, slots=True)
class PoolsStatus:
    """All pools of a database, and who is their master."""

    master: str | None
    pools: list[PoolStatus]
    reasons: list[Guided]  # why messages wait


async def read_status(
    settings: Settings, *, names: Sequence[str] = (), broker: Connection | None = None
) -> PoolsStatus:
    """Read how the pools of these names are doing, or all.

    Args:
        broker: the connection by which messages are counted; a new one unless given.
    Raises:
        NotFoundError: there is no such pool.
        DatabaseUnavailableError: no connection.
    """
    schema = settings.database.schema_name
    async with await connect_async(settings.database, application_name="relay pool status") as connection:
        bound_values(connection)
        pools = await read_pools(connection, schema)
        master = await read_master(connection, schema)
    if missing := sorted(set(names) - {pool.name for pool in pools}):
        raise NotFoundError(f"no pool {', '.join(missing)}: a pool is there once a member of it was")
    chosen = [pool for pool in pools if not names or pool.name in names]
    reasons = [] if master else [NO_MASTER]
    try:
        counts = await _count(settings, chosen, broker)
    except BrokerUnavailableError as error:
        counts = {}
        words = f"the broker does not tell how many messages wait: {error}"
        reasons.append(Guided(words, Runbook.CONSUMER_DOWN))
    shown = [_status_of(pool, counts) for pool in chosen]
    for pool in shown:
        reasons += reasons_of(pool)
    return PoolsStatus(master, shown, reasons)


async def _count(settings: Settings, pools: Sequence[Pool], broker: Connection | None) -> dict[str, int | None]:
    """Count the messages in the queues of these pools that are with nobody."""
    queues = [queue for pool in pools for queue in (*partition_queue_names(pool.queue), dead_queue_name(pool.queue))]
    connection = broker or await connect(settings.broker, "relay pool status")
    try:
        return {queue: await ready_count(connection, queue, settings.broker.connect_timeout) for queue in queues}
    finally:
        if broker is None:
            await connection.hang_up()


def _status_of(pool: Pool, counts: dict[str, int | None]) -> PoolStatus:
    held: dict[str, list[int]] = defaultdict(list)
    partitions = []
    for each in pool.partitions:
        of = each.assigned
        if of.member is not None:
            held[of.member].append(of.partition)
        queue = partition_queue_name(pool.queue, of.partition)
        partitions.append(
            PartitionStatus(
                of.partition, queue, of.epoch, of.member, of.wanted_by, each.taken_from, each.since, counts.get(queue)
            )
        )
    members = [
        MemberStatus(
            each.name,
            held[each.name],
            each.unacknowledged,
            each.leaving,
            each.silent_s > pool.check_in_timeout,
            each.checked_in_at,
            each.silent_s,
            each.joined_at,
        )
        for each in pool.members
    ]
    return PoolStatus(
        pool.name, pool.queue, pool.check_in_timeout, members, partitions, counts.get(dead_queue_name(pool.queue))
    )


def reasons_of(pool: PoolStatus) -> list[Guided]:
    """Return why messages of a pool wait."""
    reasons = []
    if not pool.members:
        reasons.append(f"pool {pool.name} has no members: messages wait")
    reasons += [f"member {each.name} of pool {pool.name} does not check in" for each in pool.members if each.late]
    if free := [str(each.partition) for each in pool.partitions if each.member is None and pool.members]:
        reasons.append(f"nobody holds partition {', '.join(free)} of pool {pool.name}")
    lagging = [
        f"{each.ready:,} messages wait in partition {each.partition} of pool {pool.name}, which {each.member} holds"
        for each in pool.partitions
        if each.member is not None and (each.ready or 0) >= LAGGING
    ]
    return [
        *(Guided(words, Runbook.CONSUMER_DOWN) for words in reasons),
        *(Guided(words, Runbook.CONSUMER_LAG) for words in lagging),
    ]


class ShowPools(Closed):
    """Which pools."""

    pool: Annotated[tuple[Text, ...], Field(description="All unless given.")] = ()


@operation("pool.status", "GET /pool/status", Role.VIEWER)
def pools(at: Servers, asked: ShowPools) -> PoolsStatus:
    """Return the members of each pool, and the holder, the epoch and the lag of each partition."""
    with at.connect(None):  # which finds the tables missing or behind
        return asyncio.run(read_status(at.settings, names=asked.pool))
