"""Move staged rows to where they belong, in the commit's transaction: business rows, then events."""

from collections.abc import Sequence

import psycopg
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from outbox_spark.errors import BatchError
from outbox_spark.plan import BusinessColumn, EventPlan, Save, Staged, of_outbox

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


def move_all(connection: psycopg.Connection, in_order: Written) -> None:
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


def refuse_repeated_ids(connection: psycopg.Connection, written: Written) -> None:
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


def _staging(save: Save, staged: Staged) -> Identifier:
    return Identifier(save.options.staging_schema, staged.table or "")
