"""The ledger of committed batches, `outbox.batch`: what makes a batch be written once.

Its row is the first thing of the transaction that writes the batch. Two drivers at the same batch meet in its
primary key: the second waits for the first, and finds the batch written or writes it itself.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.sql import SQL, Identifier
from psycopg.types.json import Jsonb

from outbox_spark.errors import TableError

WHOLE_BATCH = -1  # the `partition` of a batch that is committed in one piece

READ = SQL("""
    SELECT app_id, version, partitions, token, row_counts, committed_at
    FROM {schema}.batch
    WHERE app_id = %(app_id)s AND version = %(version)s AND partition = %(partition)s
""")

ENTER = SQL("""
    INSERT INTO {schema}.batch (app_id, version, partition, partitions, token, row_counts)
    VALUES (%(app_id)s, %(version)s, %(partition)s, %(partitions)s, %(token)s, %(row_counts)s)
    ON CONFLICT (app_id, version, partition) DO NOTHING
""")


@dataclass(frozen=True, slots=True)
class Batch:
    """A committed batch."""

    app_id: str
    version: int
    partitions: int
    token: UUID  # of the `save()` that wrote it
    row_counts: dict[str, Any]
    committed_at: datetime

    def __str__(self) -> str:
        return (
            f"batch {self.app_id!r} version {self.version} "
            f"({self.row_counts.get('rows')} rows, committed {self.committed_at:%Y-%m-%d %H:%M:%S%z})"
        )


def read(connection: psycopg.Connection, schema: str, app_id: str, version: int) -> Batch | None:
    """Read the ledger row of a batch.

    Raises:
        TableError: there is no ledger.
    """
    names = {"app_id": app_id, "version": version, "partition": WHOLE_BATCH}
    try:
        found = connection.execute(READ.format(schema=Identifier(schema)), names).fetchone()
    except psycopg.errors.UndefinedTable:
        raise TableError(
            f"table {schema}.batch does not exist in database {connection.info.dbname!r}: run `relay migrate` on it"
        ) from None
    return None if found is None else Batch(*found)


def enter(
    connection: psycopg.Connection,
    schema: str,
    *,
    app_id: str,
    version: int,
    partitions: int,
    token: UUID,
    row_counts: dict[str, Any],
) -> bool:
    """Enter the batch into the ledger, in the caller's transaction; False when it is in already.

    Waits while another transaction is at the same batch.
    """
    values = {
        "app_id": app_id,
        "version": version,
        "partition": WHOLE_BATCH,
        "partitions": partitions,
        "token": token,
        "row_counts": Jsonb(row_counts),
    }
    return connection.execute(ENTER.format(schema=Identifier(schema)), values).rowcount == 1
