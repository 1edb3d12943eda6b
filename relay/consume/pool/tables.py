"""Read the pools from their tables, for the master and for operators."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier, Literal

from relay.consume.pool.assignment import Assigned

POOLS = SQL("SELECT name, queue, check_in_timeout FROM {schema}.pool ORDER BY name")
MEMBERS = SQL("""
    SELECT pool, name, incarnation, joined_at, checked_in_at, leaving, unacknowledged,
        extract(epoch FROM clock_timestamp() - checked_in_at)::float8 AS silent_s
    FROM {schema}.pool_member ORDER BY pool, name
""")
PARTITIONS = SQL("""
    SELECT pool, partition, epoch, member, wanted_by, taken_from, since
    FROM {schema}.pool_partition ORDER BY pool, partition
""")

# Finds the master that holds the lock now, not the last one that held it.
MASTER = SQL("""
    SELECT master.name
    FROM {schema}.pool_master AS master JOIN pg_locks AS lock ON lock.pid = master.backend_pid
    WHERE lock.locktype = 'advisory' AND lock.objsubid = 2 AND lock.classid = hashtext({lock})::oid AND lock.objid = 0
        AND lock.granted AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")


@dataclass(frozen=True, slots=True)
class Member:
    """A member as of its last check-in."""

    name: str
    incarnation: UUID
    joined_at: datetime
    checked_in_at: datetime
    leaving: bool  # it gets no more partitions
    unacknowledged: int  # its messages in flight
    silent_s: float  # since its last check-in, by the database's clock


@dataclass(frozen=True, slots=True)
class Holding:
    """A partition as the tables have it."""

    assigned: Assigned
    taken_from: str | None  # the former holder, if it was gone before it released the partition
    since: datetime  # of the epoch


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool."""

    name: str  # the consumer_name of its members
    queue: str
    check_in_timeout: float
    members: list[Member]
    partitions: list[Holding]


async def read_pools(connection: AsyncConnection, schema: str) -> list[Pool]:
    """Return all pools, read in one snapshot."""
    names = Identifier(schema)
    async with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        pools = await (await cursor.execute(POOLS.format(schema=names))).fetchall()
        members, partitions = defaultdict(list), defaultdict(list)
        for row in await (await cursor.execute(MEMBERS.format(schema=names))).fetchall():
            members[row.pop("pool")].append(Member(**row))
        for row in await (await cursor.execute(PARTITIONS.format(schema=names))).fetchall():
            pool, taken_from, since = row.pop("pool"), row.pop("taken_from"), row.pop("since")
            partitions[pool].append(Holding(Assigned(**row), taken_from, since))
    return [Pool(**row, members=members[row["name"]], partitions=partitions[row["name"]]) for row in pools]


async def read_master(connection: AsyncConnection, schema: str) -> str | None:
    """Return the name of the master, or `None` without a master."""
    statement = MASTER.format(schema=Identifier(schema), lock=Literal(master_lock(schema)))
    row = await (await connection.execute(statement)).fetchone()
    return None if row is None else str(row[0])


def master_lock(schema: str) -> str:
    """Return the name of the master's advisory lock: its first number is the hash of the name, its second is 0."""
    return f"{schema}.pool"
