"""The one transaction that makes a batch be there: ledger, business rows, events, or nothing."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psycopg

from outbox_spark.connection import connect, retried, wait_for_room
from outbox_spark.errors import BatchError, CommitUnknownError, OutboxWriteError, RowError, one_line
from outbox_spark.ledger import (
    Batch,
    Entry,
    complete_pieces,
    count_repeat,
    enter,
    enter_piece,
    note_counts,
    note_seconds,
    read,
    refuse_older_checkpoint,
    refuse_other_query,
    take,
)
from outbox_spark.move import Written, move_all, put_into_quarantine, refuse_repeated_ids
from outbox_spark.plan import Pieces, Room, Save, Staged, made_at
from outbox_spark.result import Outcome, Result

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


def commit_batch(written: Written) -> Result:
    """Write the batch and enter it into the ledger, unless it is there; return which of both was done.

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
                result = _write(connection, written)
            return _counted(connection, save, result)
    except psycopg.OperationalError as error:
        # Unknown, not failed: the ledger knows.
        found = _ask_ledger(written, error)
        if found is None:
            raise BatchError(f"nothing of the batch was written: {_with_advice(error)}") from None
        return _written(save, found.row_counts) if found.token == save.token else Result.recognised(found)
    except psycopg.Error as error:
        raise BatchError(f"nothing of the batch was written: {_with_advice(error)}") from None


def commit_pieces(save: Save, pieces: Pieces, staged: Sequence[Staged]) -> Result:
    """Write the pieces that are staged, compare the others with the ledger, and enter the batch unless it is there.

    Raises:
        BatchError: pieces are missing or have other rows than before, and nothing was written here. Or the database is
            gone, and the batch may be run again.
    """
    try:
        with retried(lambda: connect(save.info), OutboxWriteError) as connection:
            if save.room is not None and not pieces.directly:
                _wait_for_room(connection, save.room)
            with connection.transaction():
                result = _write_pieces(connection, save, pieces, staged)
            return _counted(connection, save, result)
    except psycopg.Error as error:
        raise BatchError(f"the batch could not be completed: {_with_advice(error)}") from None


def _with_advice(error: psycopg.Error) -> str:
    """Return what the database says, and the advice to run again what may then work."""
    words = one_line(error).rstrip(".")
    is_lost = error.sqlstate is None and isinstance(error, psycopg.OperationalError)
    return f"{words}; run it again" if is_lost or (error.sqlstate or "").startswith(PASSING) else words


def _written(save: Save, row_counts: Mapping[str, Any]) -> Result:
    return Result.written(save.options.app_id, save.options.version, row_counts)


def _counted(connection: psycopg.Connection, save: Save, result: Result) -> Result:
    """Count a repeat of a batch that is known."""
    if result.outcome is Outcome.RECOGNISED:
        options = save.options
        count_repeat(connection, options.outbox_schema, app_id=options.app_id, version=options.version)
    return result


def _write(connection: psycopg.Connection, written: Written) -> Result:
    connection.execute(PREPARE)
    row_counts = _row_counts(written)
    found = _enter_ledger(connection, written, row_counts)
    if found is not None:
        return Result.recognised(found)
    for _, staged in written:
        _refuse_left_out(staged)
    in_order = [(save, [each for each in _by_partition(staged) if each.rows]) for save, staged in written]
    for save, staged in written:
        if save.plan.quarantine is not None:
            put_into_quarantine(connection, save, save.plan.quarantine, _by_partition(staged))
    refuse_repeated_ids(connection, in_order)
    moved = move_all(connection, in_order)
    save, _ = written[0]
    options = save.options
    if any(each.plan.passes_over for each, _ in written):
        row_counts |= {"rows": moved.rows, "messages": moved.events}
        row_counts |= {"deleted": moved.deleted, "unchanged": moved.passed_over}
        note_counts(
            connection, options.outbox_schema, app_id=options.app_id, version=options.version, row_counts=row_counts
        )
    # The tables of a stream are older than the save() that commits them.
    tables = [each.table for _, staged in written for each in staged if each.table]
    begun_at = min(made_at(name) for name in (save.staging.prefix, *tables))
    note_seconds(connection, options.outbox_schema, app_id=options.app_id, version=options.version, begun_at=begun_at)
    return _written(save, row_counts)


def _write_pieces(connection: psycopg.Connection, save: Save, pieces: Pieces, staged: Sequence[Staged]) -> Result:
    options = save.options
    schema, number, token = options.outbox_schema, pieces.number, save.token
    name: dict[str, Any] = {"app_id": options.app_id, "version": options.version}
    connection.execute(PREPARE)
    if (found := take(connection, schema, **name)) is not None:
        return Result.recognised(found)
    _refuse_left_out(staged)
    missing = [
        each
        for each in _by_partition(staged)
        if enter_piece(connection, schema, **name, number=number, token=token, piece=each) is Entry.NEW and each.rows
    ]
    move_all(connection, [(save, missing)])
    table = ".".join(save.plan.table or ())
    row_counts = complete_pieces(connection, schema, **name, number=number, token=token, table=table)
    return _written(save, row_counts)


def _refuse_left_out(staged: Sequence[Staged]) -> None:
    for each in _by_partition(staged):
        if each.refused is not None:
            raise RowError(each.refused)
    if any(each.is_left_out for each in staged):
        raise BatchError(
            "nothing of the batch was written: its staging tables were dropped while it ran, and no other driver has "
            "committed it. Give a batch that takes longer a stagingMaxAge, and run it again"
        )


def _wait_for_room(connection: psycopg.Connection, room: Room) -> None:
    wait_for_room(room, lambda query: connection.execute(query.encode()).fetchall()[0][0])


def _by_partition(staged: Sequence[Staged]) -> list[Staged]:
    return sorted(staged, key=lambda each: each.partition)


def _row_counts(written: Written) -> dict[str, Any]:
    """Return what the ledger notes of the batch, when every row that is staged is written."""
    save, _ = written[0]
    row_counts: dict[str, Any] = {
        "rows": sum(each.rows for save, staged in written if save.plan.table for each in staged),
        "table": ", ".join(".".join(save.plan.table) for save, _ in written if save.plan.table),
        "messages": sum(each.rows for save, staged in written if save.plan.event for each in staged),
    }
    if save.query is not None:
        row_counts["query"] = save.query
    if any(each.plan.quarantine is not None for each, _ in written):
        row_counts["bad_rows"] = sum(len(each.bad) for _, staged in written for each in staged)
    return row_counts


def _enter_ledger(connection: psycopg.Connection, written: Written, row_counts: dict[str, Any]) -> Batch | None:
    save, _ = written[0]
    options = save.options
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
            found = _enter_ledger(connection, written, _row_counts(written))
            connection.rollback()
            return found
        time.sleep(0.5)
    raise CommitUnknownError(
        f"the connection broke while batch {options.app_id!r} version {options.version} was being committed "
        f"({one_line(error)}), and the database does not tell whether it was. Run it again with "
        f"txnAppId {options.app_id!r} and txnVersion {options.version}: it is then written or recognised"
    )
