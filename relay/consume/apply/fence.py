"""The fence around a partition: who holds it no more commits nothing of it."""

from dataclasses import dataclass
from typing import LiteralString

from aiormq.abc import DeliveredMessage
from psycopg.sql import SQL, Composed, Identifier, Literal

PARTITION, EPOCH = "x-partition", "x-partition-epoch"
NO_PARTITION = -1  # of what no pool consumes

# The row is locked until the transaction ends: the epoch cannot be raised meanwhile, and if it just has been, there is
# no such row. The advisory lock only shows whose session is within the fence, so that the master can end that of a
# frozen member (`pool.master`). Whether we get it does not matter.
HELD: LiteralString = """
    fence AS (
        SELECT pg_try_advisory_xact_lock_shared({space}, partition::integer) FROM {schema}.pool_partition
        WHERE pool = %(consumer)s AND partition = {partition} AND epoch = {epoch} AND member IS NOT NULL
        FOR SHARE
    ),
"""
FENCED_OUT: LiteralString = "UNION ALL SELECT NULL, NULL WHERE NOT EXISTS (SELECT FROM fence)"


def lock_space(schema: str, pool: str) -> Composed:
    """Return the first of the two numbers of the advisory locks of a pool's partitions; the second is the partition."""
    return SQL("hashtext({})").format(Literal(f"{schema}.pool {pool}"))


@dataclass(frozen=True, slots=True)
class Fence:
    """A partition in the hands of one member."""

    partition: int
    epoch: int

    def held(self, schema: str, pool: str) -> Composed:
        """Return the common table expression `fence`, which is empty when another one holds the partition."""
        return SQL(HELD).format(
            schema=Identifier(schema),
            space=lock_space(schema, pool),
            partition=Literal(self.partition),
            epoch=Literal(self.epoch),
        )

    def stamp(self, delivered: DeliveredMessage) -> None:
        """Write into a message's headers under which holding it is worked on: a fence, too, for what is elsewhere."""
        properties = delivered.header.properties
        properties.headers = {**(properties.headers or {}), PARTITION: self.partition, EPOCH: self.epoch}
