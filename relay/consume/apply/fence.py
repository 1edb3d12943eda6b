"""The fence around a partition: a member that no longer holds the partition cannot commit its messages."""

from dataclasses import dataclass
from typing import LiteralString

from aiormq.abc import DeliveredMessage
from psycopg.sql import SQL, Composed, Identifier, Literal

PARTITION, EPOCH = "x-partition", "x-partition-epoch"
NO_PARTITION = -1  # of a message that no pool consumes

# FOR SHARE locks the row until the transaction ends, so the epoch cannot be raised meanwhile. If it was raised just
# before, the query finds no row. The advisory lock only shows which sessions are within the fence. By it, the master
# finds and ends the session of a frozen member (`pool.master`). Whether the session gets the lock does not matter.
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
        """Return the common table expression `fence`. It has no row when another member holds the partition."""
        return SQL(HELD).format(
            schema=Identifier(schema),
            space=lock_space(schema, pool),
            partition=Literal(self.partition),
            epoch=Literal(self.epoch),
        )

    def stamp(self, delivered: DeliveredMessage) -> None:
        """Write the partition and its epoch into the message's headers.

        Systems outside the database can use the two as a fencing token.
        """
        properties = delivered.header.properties
        properties.headers = {**(properties.headers or {}), PARTITION: self.partition, EPOCH: self.epoch}
