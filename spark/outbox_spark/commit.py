"""The one transaction that makes a batch be there: ledger, business rows, events, or nothing."""

import time
from collections.abc import Sequence
from contextlib import suppress

import psycopg
from psycopg.sql import SQL, Composed, Identifier, Literal

from outbox_spark.errors import BatchError, CommitUnknownError
from outbox_spark.ledger import Batch, enter, read
from outbox_spark.plan import AGGREGATE_ID, HEADERS, MESSAGE_ID, PAYLOAD, Save, Staged
from outbox_spark.session import connect, one_line

ASK_AGAIN_FOR = 30.0  # seconds, when the connection broke while the commit was under way

# Rows come out of a staging table as they went in: no scan that joins another one midway, no parallel workers.
# The server looks every 2 s whether this driver is still there, so that a killed one holds no lock for long; and it
# gives up when a network that died silently keeps the COMMIT from it, so that whoever asks the ledger is answered.
PREPARE = """
    SET LOCAL synchronize_seqscans = off;
    SET LOCAL max_parallel_workers_per_gather = 0;
    SET LOCAL client_connection_check_interval = '2s';
    SET LOCAL idle_in_transaction_session_timeout = '15s'
"""

MOVE_BUSINESS_ROWS = SQL("INSERT INTO {table} ({columns}) SELECT {columns} FROM {staging}")

# The parent, never the partition: the statement trigger that rings the relay is the parent's.
MOVE_EVENTS = SQL("""
    INSERT INTO {message} (message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key,
        headers, content_type, payload, writer, batch_id)
    SELECT {message_id}, {aggregate_type}, {aggregate_id}, {event_type}, {exchange}, {routing_key},
        {headers}, {content_type}, {payload}, {writer}, {batch_id}
    FROM {staging}
""")

FIND_REPEATED_SEQUENCE = SQL("""
    SELECT min({aggregate_id}), count(*) FROM ({staged}) AS staged
    GROUP BY {message_id} HAVING count(*) > 1 LIMIT 1
""")


def commit_batch(save: Save, staged: Sequence[Staged]) -> Batch | None:
    """Write the batch and enter it into the ledger; None when done, else the committed batch that was found.

    Raises:
        BatchError: nothing was written, and why.
        CommitUnknownError: the connection broke at the commit and nobody answered since.
    """
    try:
        with connect(save.info) as connection, connection.transaction():
            return _write(connection, save, staged)
    except psycopg.OperationalError as error:
        # Unknown, not failed: the ledger knows.
        found = _ask_ledger(save, staged, error)
        if found is None:
            raise BatchError(f"nothing of the batch was written: {one_line(error).rstrip('.')}; run it again") from None
        return None if found.token == save.token else found
    except psycopg.Error as error:
        raise BatchError(f"nothing of the batch was written: {one_line(error)}") from None


def _write(connection: psycopg.Connection, save: Save, staged: Sequence[Staged]) -> Batch | None:
    connection.execute(PREPARE)
    found = _enter_ledger(connection, save, staged)
    if found is not None:
        return found
    in_order = sorted((each for each in staged if each.table is not None), key=lambda each: each.partition)
    if in_order and save.plan.sequence is not None and not save.plan.sequence_is_unique:
        _refuse_repeated_sequences(connection, save, in_order)
    # Business rows of all partitions first: the events' ids are taken as late as can be, so that the relay
    # has the less to wait for ids that were given out and are not yet visible.
    for each in in_order:
        _move(connection, _business_rows_of(save, each), each, ".".join(save.plan.table))
    for each in in_order:
        _move(connection, _events_of(save, each), each, "the outbox")
    for each in in_order:
        connection.execute(SQL("DROP TABLE {}").format(_staging(save, each)))
    return None


def _enter_ledger(connection: psycopg.Connection, save: Save, staged: Sequence[Staged]) -> Batch | None:
    options = save.options
    rows = sum(each.rows for each in staged)
    entered = enter(
        connection,
        options.outbox_schema,
        app_id=options.app_id,
        version=options.version,
        partitions=len(staged),
        token=save.token,
        row_counts={"rows": rows, "table": ".".join(save.plan.table), "messages": rows},
    )
    return None if entered else read(connection, options.outbox_schema, options.app_id, options.version)


def _move(connection: psycopg.Connection, statement: Composed, staged: Staged, target: str) -> None:
    moved = connection.execute(statement).rowcount
    if moved != staged.rows:
        raise BatchError(
            f"nothing of the batch was written: partition {staged.partition} staged {staged.rows} rows and {moved} "
            f"reached {target} (has the database crashed meanwhile, or a trigger refused rows?); run the batch again"
        )


def _business_rows_of(save: Save, staged: Staged) -> Composed:
    columns = SQL(", ").join(Identifier(column.name) for column in save.plan.columns)
    return MOVE_BUSINESS_ROWS.format(
        table=Identifier(*save.plan.table), columns=columns, staging=_staging(save, staged)
    )


def _events_of(save: Save, staged: Staged) -> Composed:
    options = save.options
    return MOVE_EVENTS.format(
        message=Identifier(options.outbox_schema, "message"),
        message_id=Identifier(MESSAGE_ID),
        aggregate_type=Literal(options.aggregate_type),
        aggregate_id=Identifier(AGGREGATE_ID),
        event_type=Literal(options.event_type),
        exchange=Literal(options.exchange),
        routing_key=Literal(options.routing_key),
        headers=Literal(None) if save.plan.headers is None else Identifier(HEADERS),
        content_type=Literal(options.content_type),
        payload=Identifier(PAYLOAD),
        writer=Literal(options.app_id),
        batch_id=Literal(options.version),
        staging=_staging(save, staged),
    )


def _refuse_repeated_sequences(connection: psycopg.Connection, save: Save, staged: Sequence[Staged]) -> None:
    every = SQL(" UNION ALL ").join(
        SQL("SELECT {}, {} FROM {}").format(Identifier(MESSAGE_ID), Identifier(AGGREGATE_ID), _staging(save, each))
        for each in staged
    )
    query = FIND_REPEATED_SEQUENCE.format(
        message_id=Identifier(MESSAGE_ID), aggregate_id=Identifier(AGGREGATE_ID), staged=every
    )
    found = connection.execute(query).fetchone()
    if found is not None:
        options = save.options
        raise BatchError(
            f"nothing of the batch was written: {found[1]} events of {options.aggregate_type} {found[0]!r} have the "
            f"same {options.sequence_column!r}, so consumers would take them for one; name a column that tells them "
            "apart with the option sequenceColumn"
        )


def _ask_ledger(save: Save, staged: Sequence[Staged], error: psycopg.Error) -> Batch | None:
    """Tell what the ledger has of the batch once the transaction that broke has ended, one way or the other.

    Reading would not tell: the server may still be at its COMMIT. Entering the batch waits for it.
    """
    options = save.options
    give_up_at = time.monotonic() + ASK_AGAIN_FOR
    while (left := give_up_at - time.monotonic()) > 0:
        # Still no connection, lost again, or the transaction has not ended; or a standby on its way to be primary.
        not_yet = suppress(psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction)
        with not_yet, psycopg.connect(save.info) as connection:
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [f"{left + 0.001:.3f}s"])
            found = _enter_ledger(connection, save, staged)
            connection.rollback()
            return found
        time.sleep(0.5)
    raise CommitUnknownError(
        f"the connection broke while batch {options.app_id!r} version {options.version} was being committed "
        f"({one_line(error)}), and the database does not tell whether it was; run it again with "
        f"txnAppId {options.app_id!r} and txnVersion {options.version}: it is then written or recognised"
    )


def _staging(save: Save, staged: Staged) -> Identifier:
    return Identifier(save.options.staging_schema, staged.table or "")
