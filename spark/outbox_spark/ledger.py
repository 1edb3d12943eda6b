"""The ledger of committed batches, `outbox.batch`: what makes a batch be written once.

Its row is the first thing of the transaction that writes the batch. Two drivers at the same batch meet in its primary
key. The second waits for the first, and finds the batch written or writes it itself.

A batch in pieces has a row for each of them, the first thing of its transaction, too. A row before these says how many
pieces there are, so that no rerun divides the rows otherwise. The row of a whole batch comes behind the last.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.sql import SQL, Identifier, Literal
from psycopg.types.json import Jsonb

from outbox_spark.errors import BatchError, TableError
from outbox_spark.plan import Staged

# The `partition` of rows that are no piece's.
WHOLE_BATCH = -1  # the batch is committed
IN_PIECES = -2  # it was begun in so many pieces
OF_QUERY = -3  # a query of foreach_batch() has the name; its batches have their own names

# Two that begin a batch in different ways have no row in common to meet in: they meet here.
TAKE_NAME = """
    SELECT pg_advisory_xact_lock(hashtextextended(concat_ws('/', %(schema)s::text, %(app_id)s::text, %(version)s), 0))
"""

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

NOTE_SECONDS = SQL("""
    UPDATE {schema}.batch
    SET row_counts = row_counts
        || jsonb_build_object('seconds', floor(extract(epoch FROM clock_timestamp()) - %(begun_at)s)::bigint)
    WHERE app_id = %(app_id)s AND version = %(version)s AND partition = %(whole_batch)s
""")

NOTE_COUNTS = SQL("""
    UPDATE {schema}.batch SET row_counts = %(row_counts)s
    WHERE app_id = %(app_id)s AND version = %(version)s AND partition = %(whole_batch)s
""")

COUNT_REPEAT = SQL("""
    UPDATE {schema}.batch
    SET row_counts = row_counts || jsonb_build_object('repeats', 1 + CASE jsonb_typeof(row_counts->'repeats')
        WHEN 'number' THEN (row_counts->'repeats')::numeric ELSE 0 END)
    WHERE app_id = %(app_id)s AND version = %(version)s AND partition = %(whole_batch)s
""")

# Rows without a role were written before the migration 0011. A role that was dropped since is nobody's.
# The role to which the ledger is granted is every job's: any of them may take it on, and write a row by its name.
FIND_FOREIGN = SQL("""
    SELECT min(written_as::text), current_user FROM {schema}.batch
    WHERE app_id = %(app_id)s AND version = %(version)s AND written_as IS NOT NULL
        AND (pg_has_role(to_regrole(quote_ident(written_as)), 'MEMBER') IS NOT TRUE
            OR written_as <> current_user AND EXISTS (
                SELECT FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
                CROSS JOIN LATERAL (SELECT * FROM aclexplode(relacl) UNION SELECT * FROM aclexplode(attacl)) AS acl
                WHERE pg_class.oid = {name}::regclass AND privilege_type = 'INSERT'
                    AND grantee = to_regrole(quote_ident(written_as))))
""")

FIND_GIVEN_UP = SQL("""
    SELECT given_up_at, given_up_by, given_up_why FROM {schema}.batch
    WHERE app_id = %(app_id)s AND version = %(version)s AND given_up_at IS NOT NULL
""")

FIND_LATER = SQL("""
    SELECT max(version) FROM {schema}.batch
    WHERE app_id = %(app_id)s AND version > %(version)s AND partition = %(whole_batch)s
""")

COUNT_PIECES = SQL("""
    SELECT begun.partitions, count(piece), coalesce(sum((piece.row_counts->>'rows')::bigint), 0)::bigint
    FROM {schema}.batch AS begun LEFT JOIN {schema}.batch AS piece
        ON piece.app_id = begun.app_id AND piece.version = begun.version
        AND piece.partition BETWEEN 0 AND begun.partitions - 1
    WHERE begun.app_id = %(app_id)s AND begun.version = %(version)s AND begun.partition = %(in_pieces)s
    GROUP BY begun.partitions
""")


@dataclass(frozen=True, slots=True)
class Batch:
    """A committed batch.

    Attributes:
        row_counts: `rows` of the `table`, `messages`, and the `query` of a micro-batch. `deleted` and `unchanged` rows,
            where options of the batch ask for these. `seconds` from its begin to its commit, and `repeats`, how often
            it came again: both only where the role may change row_counts.
    """

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


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch in pieces that is not committed."""

    token: UUID  # of the `save()` that began it


class Entry(Enum):
    """Whether a row of the ledger was written now."""

    NEW = auto()
    KNOWN = auto()  # an earlier transaction has written it


def read(connection: psycopg.Connection, schema: str, app_id: str, version: int) -> Batch | None:
    """Read the ledger row of a batch.

    Raises:
        TableError: there is no ledger, or one of an earlier release.
        BatchError: a role wrote it that this one is no member of, or an operator gave it up.
    """
    try:
        found = _find(connection, schema, app_id, version, partition=WHOLE_BATCH)
        _refuse_given_up(connection, schema, app_id, version)
        _refuse_foreign(connection, schema, app_id, version)
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
        raise TableError(
            f"table {schema}.batch does not exist in database {connection.info.dbname!r}, or is of an earlier release:"
            " run `relay migrate` on it"
        ) from None
    return found


def enter(
    connection: psycopg.Connection,
    schema: str,
    *,
    app_id: str,
    version: int,
    partitions: int,
    token: UUID,
    row_counts: dict[str, Any],
) -> Entry:
    """Enter the batch into the ledger, in the caller's transaction.

    Waits while another transaction is at the same batch.

    Raises:
        BatchError: it was begun in pieces.
    """
    _take_name(connection, schema, app_id, version)
    entered = _enter(
        connection,
        schema,
        app_id=app_id,
        version=version,
        partition=WHOLE_BATCH,
        partitions=partitions,
        token=token,
        row_counts=Jsonb(row_counts),
    )
    if entered is Entry.NEW:
        refuse_begun_in_pieces(connection, schema, app_id, version)
    return entered


def refuse_begun_in_pieces(connection: psycopg.Connection, schema: str, app_id: str, version: int) -> None:
    """Raise BatchError when some pieces of the batch may be written: writing all of it would repeat them."""
    _refuse_foreign(connection, schema, app_id, version)
    if (begun := _count_pieces(connection, schema, app_id, version)) is not None:
        number, written, _ = begun
        raise BatchError(
            f"batch {app_id!r} version {version} was begun in {number} pieces, of which {written} are written: "
            f"run it again in the same way, with atomic=partition and numPartitions={number}"
        )


def begin_pieces(
    connection: psycopg.Connection, schema: str, *, app_id: str, version: int, number: int, token: UUID, table: str
) -> Batch | Begun:
    """Fix the number of the batch's pieces. Return the batch if it is committed, else how it was begun.

    Raises:
        BatchError: it was begun with another number, or by another role.
        TableError: there is no ledger.
    """
    with connection.transaction():
        if (committed := take(connection, schema, app_id, version)) is not None:
            return committed
        _enter(
            connection,
            schema,
            app_id=app_id,
            version=version,
            partition=IN_PIECES,
            partitions=number,
            token=token,
            row_counts=Jsonb({"table": table}),
        )
        begun = _find(connection, schema, app_id, version, partition=IN_PIECES)
        counted = _count_pieces(connection, schema, app_id, version)
    assert begun is not None and counted is not None, "it was entered above"  # noqa: S101, PT018
    if begun.partitions != number:
        raise BatchError(
            f"batch {app_id!r} version {version} was begun in {begun.partitions} pieces, of which {counted[1]} are "
            f"written, and cannot go on in {number}. Run it again with numPartitions={begun.partitions} and as many "
            "partitions"
        )
    return Begun(begun.token)


def take(connection: psycopg.Connection, schema: str, app_id: str, version: int) -> Batch | None:
    """Keep others from beginning or ending the batch in the caller's transaction; return it when it is committed.

    Raises:
        TableError, BatchError: as `read` does.
    """
    _take_name(connection, schema, app_id, version)
    return read(connection, schema, app_id, version)


def note_seconds(connection: psycopg.Connection, schema: str, *, app_id: str, version: int, begun_at: float) -> None:
    """Note how long a batch took, at the end of the transaction that writes it.

    Args:
        begun_at: the database's time of its begin, in seconds since 1970.
    """
    _note(connection, NOTE_SECONDS, schema, app_id=app_id, version=version, begun_at=begun_at)


def note_counts(
    connection: psycopg.Connection, schema: str, *, app_id: str, version: int, row_counts: dict[str, Any]
) -> None:
    """Note what only the rows of the tables could tell, in the transaction that writes the batch."""
    values = {"app_id": app_id, "version": version, "whole_batch": WHOLE_BATCH, "row_counts": Jsonb(row_counts)}
    connection.execute(NOTE_COUNTS.format(schema=Identifier(schema)), values)


def count_repeat(connection: psycopg.Connection, schema: str, *, app_id: str, version: int) -> None:
    """Count that a committed batch came again, and was not written."""
    _note(connection, COUNT_REPEAT, schema, app_id=app_id, version=version)


def enter_piece(
    connection: psycopg.Connection, schema: str, *, app_id: str, version: int, number: int, token: UUID, piece: Staged
) -> Entry:
    """Enter a piece in the caller's transaction; one that is in already has the same rows.

    Raises:
        BatchError: it is in with other rows, or the ledger does not say with which.
    """
    entered = _enter(
        connection,
        schema,
        app_id=app_id,
        version=version,
        partition=piece.partition,
        partitions=number,
        token=token,
        row_counts=Jsonb(piece.row_counts),
    )
    found = _find(connection, schema, app_id, version, partition=piece.partition)
    if found is None or found.row_counts == piece.row_counts:
        return entered
    which = f"partition {piece.partition} of batch {app_id!r} version {version}"
    if "checksum" not in found.row_counts:
        raise BatchError(
            f"{which} was written by an earlier release, which noted no checksum to compare its rows by: finish the "
            "batch with that release"
        )
    raise BatchError(
        f"{which} was written with {found.row_counts['rows']} rows, and they are not the {piece.rows} that it has now. "
        "A rerun takes the same options and types of columns, and the same rows in the same partitions and order"
    )


def complete_pieces(
    connection: psycopg.Connection, schema: str, *, app_id: str, version: int, number: int, token: UUID, table: str
) -> dict[str, Any]:
    """Enter the batch whose pieces are all written, in the caller's transaction, which has taken it.

    Returns:
        its row_counts.

    Raises:
        BatchError: pieces are missing.
    """
    _, written, rows = _count_pieces(connection, schema, app_id, version) or (number, 0, 0)
    if written != number:
        raise BatchError(
            f"batch {app_id!r} version {version} has {written} of its {number} pieces: does the DataFrame have as "
            "many partitions as numPartitions says?"
        )
    row_counts = {"rows": rows, "table": table, "messages": rows}
    _enter(
        connection,
        schema,
        app_id=app_id,
        version=version,
        partition=WHOLE_BATCH,
        partitions=number,
        token=token,
        row_counts=Jsonb(row_counts),
    )
    if (begun := _find(connection, schema, app_id, version, partition=IN_PIECES)) is not None:
        begun_at = begun.committed_at.timestamp()
        note_seconds(connection, schema, app_id=app_id, version=version, begun_at=begun_at)
    return row_counts


def take_for_query(connection: psycopg.Connection, schema: str, *, app_id: str, number: int, query: str) -> str:
    """Let one query alone have a name, for as long as the ledger lasts; return the name of its micro-batches.

    Raises:
        BatchError: another query has it, the micro-batch was written under the name itself, or later ones are written.
        TableError: there is no ledger.
    """
    found = read(connection, schema, app_id, number)
    if found is None:
        names = {"app_id": app_id, "version": 0, "partition": OF_QUERY, "partitions": 0}
        _enter(connection, schema, **names, token=uuid4(), row_counts=Jsonb({"query": query}))
        found = _find(connection, schema, app_id, 0, partition=OF_QUERY)
    if found is not None:
        refuse_other_query(found, query)
    name = f"{app_id}/{query}"
    refuse_older_checkpoint(connection, schema, app_id=name, number=number)
    return name


def refuse_other_query(found: Batch, query: str) -> None:
    """Raise BatchError unless this query wrote what is in the ledger under its name."""
    if found.row_counts.get("query") != query:
        # Numbered from 0 again, its micro-batches would be taken for those of the other: lost without an error.
        raise BatchError(
            f"{found.app_id!r} belongs to another query than this one, in the ledger since "
            f"{found.committed_at:%Y-%m-%d %H:%M:%S%z}. A stream without its checkpoint is a new one, and takes "
            "another name (txnAppId or app_id). Let it begin behind the last row that is written, or rows come twice"
        )


def refuse_older_checkpoint(connection: psycopg.Connection, schema: str, *, app_id: str, number: int) -> None:
    """Raise BatchError when later micro-batches are written: Spark repeats only the last."""
    names = {"app_id": app_id, "version": number, "whole_batch": WHOLE_BATCH}
    ((later,),) = connection.execute(FIND_LATER.format(schema=Identifier(schema)), names).fetchall()
    if later is not None:
        # The number stands for other rows now, and would be taken for written: lost without an error.
        raise BatchError(
            f"micro-batch {number} of {app_id!r} comes after micro-batch {later} was written. Its checkpoint is older "
            "than the ledger, and its rows would be lost. Go on with the newest checkpoint. If it is gone, "
            "take another name (txnAppId or app_id), and begin behind the last row that is written, or rows come twice"
        )


def _take_name(connection: psycopg.Connection, schema: str, app_id: str, version: int) -> None:
    connection.execute(TAKE_NAME, {"schema": schema, "app_id": app_id, "version": version})


def _refuse_foreign(connection: psycopg.Connection, schema: str, app_id: str, version: int) -> None:
    names = {"app_id": app_id, "version": version}
    ((writer, role),) = connection.execute(
        FIND_FOREIGN.format(schema=Identifier(schema), name=Literal(f"{schema}.batch")), names
    ).fetchall()
    if writer is not None:
        raise BatchError(
            f"batch {app_id!r} version {version} is in the ledger {schema}.batch by role {writer!r}. Role {role!r}"
            f" of this job is no member of it, or shares it with every job. If it is the same job: GRANT {writer} TO"
            f" {role}, or, where that role is gone or shared, let the ledger's owner set written_as. If not: name the"
            " batch otherwise, by txnAppId"
        )


def _refuse_given_up(connection: psycopg.Connection, schema: str, app_id: str, version: int) -> None:
    # The database refuses it as well (migration 0026), also between this look and the write.
    names = {"app_id": app_id, "version": version}
    given_up = connection.execute(FIND_GIVEN_UP.format(schema=Identifier(schema)), names).fetchone()
    if given_up is not None:
        at, by, why = given_up
        raise BatchError(
            f"batch {app_id!r} version {version} was given up by {by} at {at:%Y-%m-%d %H:%M:%S%z}: {why}. What it has"
            " written stays. Write what is missing under another name: rows that are written would come twice"
        )


def _find(connection: psycopg.Connection, schema: str, app_id: str, version: int, *, partition: int) -> Batch | None:
    names = {"app_id": app_id, "version": version, "partition": partition}
    found = connection.execute(READ.format(schema=Identifier(schema)), names).fetchone()
    return None if found is None else Batch(*found)


def _enter(connection: psycopg.Connection, schema: str, **values: Any) -> Entry:
    written = connection.execute(ENTER.format(schema=Identifier(schema)), values).rowcount
    return Entry.NEW if written else Entry.KNOWN


def _note(connection: psycopg.Connection, statement: SQL, schema: str, **values: Any) -> None:
    # Without the right or on a standby nothing is noted, and a batch is written or recognised all the same.
    refused = (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction)
    with suppress(*refused), connection.transaction():
        connection.execute(statement.format(schema=Identifier(schema)), {**values, "whole_batch": WHOLE_BATCH})


def _count_pieces(
    connection: psycopg.Connection, schema: str, app_id: str, version: int
) -> tuple[int, int, int] | None:
    """Return the number of pieces, how many are written, and their rows; None when the batch is not in pieces."""
    query = COUNT_PIECES.format(schema=Identifier(schema))
    return connection.execute(query, {"app_id": app_id, "version": version, "in_pieces": IN_PIECES}).fetchone()
