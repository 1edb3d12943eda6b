"""The one transaction that makes a batch be there: ledger, business rows, events, or nothing."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from outbox_spark.connection import connect, retried, wait_for_room
from outbox_spark.errors import BatchError, CommitUnknownError, OutboxWriteError, one_line
from outbox_spark.ledger import (
    Batch,
    Entry,
    complete_pieces,
    count_repeat,
    enter,
    enter_piece,
    note_seconds,
    read,
    refuse_older_checkpoint,
    refuse_other_query,
    take,
)
from outbox_spark.plan import BusinessColumn, EventPlan, Pieces, Room, Save, Staged, made_at, of_outbox

ASK_AGAIN_FOR = 30.0  # seconds, when the connection broke while the commit was under way

# SQLSTATEs of what passes: a lost connection, a conflict of transactions, too many connections, a lock. Also a server
# that stops or starts, and a standby that is about to be primary.
PASSING = ("08", "40", "53300", "55P03", "57P", "25006")

# Rows come out of a staging table as they went in: no scan that joins another one midway, no parallel workers.
# The server looks every 2 s whether this driver is still there, so that a killed one holds no lock for long. It gives
# up when a network that died silently keeps the COMMIT from it: a driver that asks the ledger gets its answer.
PREPARE = """
    SET LOCAL synchronize_seqscans = off;
    SET LOCAL max_parallel_workers_per_gather = 0;
    SET LOCAL client_connection_check_interval = '2s';
    SET LOCAL idle_in_transaction_session_timeout = '15s'
"""

MOVE_BUSINESS_ROWS = SQL("INSERT INTO {table} ({columns}) SELECT {values} FROM {staging}{on_conflict}")
UPDATE = SQL(" ON CONFLICT ({keys}) DO UPDATE SET {changes}")

# The parent, never the partition: the statement trigger that rings the relay is the parent's.
MOVE_EVENTS = SQL("INSERT INTO {message} ({columns}) SELECT {values} FROM {staging}")

FIND_REPEATED_ID = SQL("""
    SELECT min(aggregate_id), count(*) FROM ({staged}) AS staged
    GROUP BY message_id HAVING count(*) > 1 LIMIT 1
""")

# Each staging table is a separate INSERT, of which a later one would update the rows of an earlier one.
FIND_REPEATED_KEY = SQL("""
    SELECT row({keys})::text, count(*) FROM ({staged}) AS staged GROUP BY {keys} HAVING count(*) > 1 LIMIT 1
""")

Written = Sequence[tuple[Save, Sequence[Staged]]]  # each DataFrame of the batch, with what its winning attempts staged


def commit_batch(written: Written) -> Batch | None:
    """Write the batch and enter it into the ledger; None when done, else the committed batch that was found.

    Raises:
        BatchError: nothing was written, and why.
        CommitUnknownError: the connection broke at the commit, and the database has not answered since.
    """
    save, _ = written[0]
    try:
        with retried(lambda: connect(save.info), OutboxWriteError) as connection:
            if save.room is not None:
                _wait_for_room(connection, save.room)
            with connection.transaction():
                known = _write(connection, written)
            return _counted(connection, save, known)
    except psycopg.OperationalError as error:
        # Unknown, not failed: the ledger knows.
        found = _ask_ledger(written, error)
        if found is None:
            raise BatchError(f"nothing of the batch was written: {_with_advice(error)}") from None
        return None if found.token == save.token else found
    except psycopg.Error as error:
        raise BatchError(f"nothing of the batch was written: {_with_advice(error)}") from None


def commit_pieces(save: Save, pieces: Pieces, staged: Sequence[Staged]) -> Batch | None:
    """Write the pieces that are staged, compare the others with the ledger, and enter the batch; None when done.

    Else the committed batch that was found.

    Raises:
        BatchError: pieces are missing or have other rows than before, and nothing was written here. Or the database is
            gone, and the batch may be run again.
    """
    try:
        with retried(lambda: connect(save.info), OutboxWriteError) as connection:
            if save.room is not None and not pieces.directly:
                _wait_for_room(connection, save.room)
            with connection.transaction():
                known = _write_pieces(connection, save, pieces, staged)
            return _counted(connection, save, known)
    except psycopg.Error as error:
        raise BatchError(f"the batch could not be completed: {_with_advice(error)}") from None


def _with_advice(error: psycopg.Error) -> str:
    """Return what the database says, and the advice to run again what may then work."""
    words = one_line(error).rstrip(".")
    is_lost = error.sqlstate is None and isinstance(error, psycopg.OperationalError)
    return f"{words}; run it again" if is_lost or (error.sqlstate or "").startswith(PASSING) else words


def _counted(connection: psycopg.Connection, save: Save, known: Batch | None) -> Batch | None:
    """Count a repeat of a batch that is known."""
    if known is not None:
        options = save.options
        count_repeat(connection, options.outbox_schema, app_id=options.app_id, version=options.version)
    return known


def _write(connection: psycopg.Connection, written: Written) -> Batch | None:
    connection.execute(PREPARE)
    found = _enter_ledger(connection, written)
    if found is not None:
        return found
    for _, staged in written:
        _refuse_left_out(staged)
    in_order = [(save, [each for each in _by_partition(staged) if each.rows]) for save, staged in written]
    _refuse_repeated_ids(connection, in_order)
    _move_all(connection, in_order)
    save, _ = written[0]
    # The tables of a stream are older than the save() that commits them.
    tables = [each.table for _, staged in written for each in staged if each.table]
    begun_at = min(made_at(name) for name in (save.staging.prefix, *tables))
    options = save.options
    note_seconds(connection, options.outbox_schema, app_id=options.app_id, version=options.version, begun_at=begun_at)
    return None


def _write_pieces(connection: psycopg.Connection, save: Save, pieces: Pieces, staged: Sequence[Staged]) -> Batch | None:
    options = save.options
    schema, number, token = options.outbox_schema, pieces.number, save.token
    name: dict[str, Any] = {"app_id": options.app_id, "version": options.version}
    connection.execute(PREPARE)
    if (found := take(connection, schema, **name)) is not None:
        return found
    _refuse_left_out(staged)
    missing = [
        each
        for each in _by_partition(staged)
        if enter_piece(connection, schema, **name, number=number, token=token, piece=each) is Entry.NEW and each.rows
    ]
    _move_all(connection, [(save, missing)])
    complete_pieces(connection, schema, **name, number=number, token=token, table=".".join(save.plan.table or ()))
    return None


def _refuse_left_out(staged: Sequence[Staged]) -> None:
    if any(each.is_left_out for each in staged):
        raise BatchError(
            "nothing of the batch was written: its staging tables were dropped while it ran, and no other driver has "
            "committed it. Give a batch that takes longer a stagingMaxAge, and run it again"
        )


def _wait_for_room(connection: psycopg.Connection, room: Room) -> None:
    wait_for_room(room, lambda query: connection.execute(query.encode()).fetchall()[0][0])


def _move_all(connection: psycopg.Connection, in_order: Written) -> None:
    # Business rows of all partitions first: the events' ids are taken as late as can be. So the relay waits less for
    # ids that were given out and are not yet visible.
    for save, staged in in_order:
        if save.plan.table is not None:
            _refuse_repeated_keys(connection, save, staged)
            for each in staged:
                _move(connection, _business_rows_of(save, save.plan.table, each), each, ".".join(save.plan.table))
    events = [(save.plan.event, save, staged) for save, staged in in_order if save.plan.event is not None]
    for event, save, staged in sorted(events, key=lambda each: each[0].number):
        for each in staged:
            _move(connection, _events_of(save, event, each), each, "the outbox")
    for save, staged in in_order:
        for each in staged:
            connection.execute(SQL("DROP TABLE {}").format(_staging(save, each)))


def _by_partition(staged: Sequence[Staged]) -> list[Staged]:
    return sorted(staged, key=lambda each: each.partition)


def _enter_ledger(connection: psycopg.Connection, written: Written) -> Batch | None:
    save, _ = written[0]
    options = save.options
    row_counts: dict[str, Any] = {
        "rows": sum(each.rows for save, staged in written if save.plan.table for each in staged),
        "table": ", ".join(".".join(save.plan.table) for save, _ in written if save.plan.table),
        "messages": sum(each.rows for save, staged in written if save.plan.event for each in staged),
    }
    if save.query is not None:
        row_counts["query"] = save.query
    entered = enter(
        connection,
        options.outbox_schema,
        app_id=options.app_id,
        version=options.version,
        partitions=sum(len(staged) for _, staged in written),
        token=save.token,
        row_counts=row_counts,
    )
    found = None if entered is Entry.NEW else read(connection, options.outbox_schema, options.app_id, options.version)
    if save.query is not None:
        if found is not None:
            refuse_other_query(found, save.query)
        refuse_older_checkpoint(connection, options.outbox_schema, app_id=options.app_id, number=options.version)
    return found


def _move(connection: psycopg.Connection, statement: Composed, staged: Staged, target: str) -> None:
    moved = connection.execute(statement).rowcount
    if moved != staged.rows:
        raise BatchError(
            f"nothing of the batch was written: partition {staged.partition} staged {staged.rows} rows and {moved} "
            f"reached {target}. Has the database crashed meanwhile? Then run the batch again. Where a trigger refuses "
            "rows, it does so again"
        )


def _business_rows_of(save: Save, table: tuple[str, str], staged: Staged) -> Composed:
    columns = [Identifier(column.name) for column in save.plan.columns]
    on_conflict: Composable = SQL("")
    if save.plan.keys:
        # A row that consists of its key is written, too, so that the counts tell what happened to each.
        changed = [column for column in save.plan.columns if column.name not in save.plan.keys] or save.plan.columns
        changes = [SQL("{0} = EXCLUDED.{0}").format(Identifier(column.name)) for column in changed]
        keys = SQL(", ").join(Identifier(name) for name in save.plan.keys)
        on_conflict = UPDATE.format(keys=keys, changes=SQL(", ").join(changes))
    return MOVE_BUSINESS_ROWS.format(
        table=Identifier(*table),
        columns=SQL(", ").join(columns),
        values=SQL(", ").join(_value(column) for column in save.plan.columns),
        staging=_staging(save, staged),
        on_conflict=on_conflict,
    )


def _value(column: BusinessColumn) -> Composable:
    return SQL("{}" if column.cast is None else f"CAST({{}} AS {column.cast})").format(Identifier(column.name))


def _events_of(save: Save, event: EventPlan, staged: Staged) -> Composed:
    options = save.options
    values: dict[str, Composable] = {name: Identifier(of_outbox(name)) for name in event.columns}
    same = {**event.same, "writer": options.app_id, "batch_id": options.version}
    values |= {name: Literal(value) for name, value in same.items()}
    return MOVE_EVENTS.format(
        message=Identifier(options.outbox_schema, "message"),
        columns=SQL(", ").join(Identifier(name) for name in values),
        values=SQL(", ").join(values.values()),
        staging=_staging(save, staged),
    )


def _refuse_repeated_ids(connection: psycopg.Connection, written: Written) -> None:
    # All DataFrames at once: two of them may have the same message key, or were given the same id. Those with ids by
    # place are not read: unique by construction.
    staged_ids = [
        _ids_of(save, save.plan.event, each)
        for save, staged in written
        if save.plan.event is not None and save.plan.event.may_repeat_ids
        for each in staged
    ]
    if not staged_ids:
        return
    found = connection.execute(FIND_REPEATED_ID.format(staged=SQL(" UNION ALL ").join(staged_ids))).fetchone()
    if found is not None:
        raise BatchError(
            f"nothing of the batch was written: {found[1]} events of key {found[0]!r} have the same message id, so "
            "consumers would take them for one. sequenceColumn, message_key or message_id must tell them apart"
        )


def _refuse_repeated_keys(connection: psycopg.Connection, save: Save, staged: Sequence[Staged]) -> None:
    if not save.plan.keys or not staged:
        return
    keys = SQL(", ").join(Identifier(name) for name in save.plan.keys)
    values = SQL(", ").join(
        SQL("{} AS {}").format(_value(column), Identifier(column.name))
        for column in save.plan.columns
        if column.name in save.plan.keys
    )
    every_row = SQL(" UNION ALL ").join(
        SQL("SELECT {} FROM {}").format(values, _staging(save, each)) for each in staged
    )
    found = connection.execute(FIND_REPEATED_KEY.format(keys=keys, staged=every_row)).fetchone()
    if found is not None:
        raise BatchError(
            f"nothing of the batch was written: {found[1]} rows for {'.'.join(save.plan.table or ())} have the same "
            f"{', '.join(save.plan.keys)} {found[0]}, and mode upsert writes one. Leave one of them in the DataFrame"
        )


def _ids_of(save: Save, event: EventPlan, staged: Staged) -> Composed:
    key = Identifier(of_outbox("aggregate_id")) if "aggregate_id" in event.texts else SQL("NULL::text")
    return SQL("SELECT {} AS message_id, {} AS aggregate_id FROM {}").format(
        Identifier(of_outbox("message_id")), key, _staging(save, staged)
    )


def _ask_ledger(written: Written, error: psycopg.Error) -> Batch | None:
    """Return what the ledger has of the batch once the transaction that broke has ended, one way or the other.

    Reading would not tell: the server may still be at its COMMIT. Entering the batch waits for it.
    """
    save, _ = written[0]
    options = save.options
    give_up_at = time.monotonic() + ASK_AGAIN_FOR
    while (left := give_up_at - time.monotonic()) > 0:
        # Still no connection, lost again, or the transaction has not ended; or a standby on its way to be primary.
        not_yet = suppress(psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction)
        with not_yet, psycopg.connect(save.info) as connection:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [f"{left + 0.001:.3f}s"])
            found = _enter_ledger(connection, written)
            connection.rollback()
            return found
        time.sleep(0.5)
    raise CommitUnknownError(
        f"the connection broke while batch {options.app_id!r} version {options.version} was being committed "
        f"({one_line(error)}), and the database does not tell whether it was. Run it again with "
        f"txnAppId {options.app_id!r} and txnVersion {options.version}: it is then written or recognised"
    )


def _staging(save: Save, staged: Staged) -> Identifier:
    return Identifier(save.options.staging_schema, staged.table or "")
