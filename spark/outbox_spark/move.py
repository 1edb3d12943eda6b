"""Move staged rows to where they belong, in the commit's transaction: business rows, then events."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from outbox_spark.errors import BatchError, RowError
from outbox_spark.plan import DELETE_FLAG, BusinessColumn, EventPlan, Quarantine, Save, Staged, Upsert, of_outbox

INSERT = SQL("INSERT INTO {table} AS target ({columns}) SELECT {values} FROM {staging} AS staged{where}{on_conflict}")
UPDATE = SQL(" ON CONFLICT ({keys}) DO UPDATE SET {changes}{where}")
LEAVE = SQL(" ON CONFLICT ({keys}) DO NOTHING")

# What a transaction of another session changes meanwhile is waited for: INSERT and DELETE look at the row as it is
# then, and lock it. So a staged row is passed over only while its row in the table is as it is found.
INSERT_AND_PASS_OVER = SQL("""
    WITH done AS ({insert} RETURNING {target_keys}), passed_over AS (
        DELETE FROM {staging} AS staged
        WHERE {is_written} AND NOT EXISTS (SELECT FROM done AS target WHERE {same_keys}) RETURNING 1
    )
    SELECT (SELECT count(*) FROM done), (SELECT count(*) FROM passed_over)
""")
DELETE_AND_PASS_OVER = SQL("""
    WITH done AS (
        DELETE FROM {table} AS target USING {staging} AS staged
        WHERE staged.{flag} AND {same_keys} RETURNING {target_keys}
    ), passed_over AS (
        DELETE FROM {staging} AS staged
        WHERE staged.{flag} AND NOT EXISTS (SELECT FROM done AS target WHERE {same_keys}) RETURNING 1
    )
    SELECT (SELECT count(*) FROM done), (SELECT count(*) FROM passed_over)
""")

# The parent, never the partition: the statement trigger that rings the relay is the parent's.
MOVE_EVENTS = SQL("INSERT INTO {message} ({columns}) SELECT {values} FROM {staging}")

# Without a sort: rows come out of a staging table as they went in. The seconds are whole, as both numbers are.
IN_TURN = SQL("now() + make_interval(secs => ({after} + row_number() OVER () - 1) / {rate})")

PUT_INTO_QUARANTINE = SQL("""
    INSERT INTO {table} (app_id, version, table_name, partition, position, reason, row_json)
    VALUES (%s, %s, %s, %s, %s, %s, %s)
""")

FIND_REPEATED_ID = SQL("""
    SELECT min(aggregate_id), count(*) FROM ({staged}) AS staged
    GROUP BY message_id HAVING count(*) > 1 LIMIT 1
""")

# Each staging table is a separate INSERT, of which a later one would update the rows of an earlier one.
FIND_REPEATED_KEY = SQL("""
    SELECT row({keys})::text, count(*) FROM ({staged}) AS staged GROUP BY {keys} HAVING count(*) > 1 LIMIT 1
""")

Written = Sequence[tuple[Save, Sequence[Staged]]]  # each DataFrame of the batch, with what its winning attempts staged


@dataclass(slots=True)
class Moved:
    """How many rows became what."""

    rows: int = 0  # inserted or updated
    deleted: int = 0
    passed_over: int = 0  # staged, but nothing of the table had to change: they make no event
    events: int = 0


def move_all(connection: psycopg.Connection, in_order: Written) -> Moved:
    """Move the rows of all staging tables, which are dropped.

    Raises:
        BatchError: not all of them arrive, or a key is there twice.
    """
    moved = Moved()
    # Business rows of all partitions first: the events' ids are taken as late as can be. So the relay waits less for
    # ids that were given out and are not yet visible.
    left = [(save, _move_business_rows(connection, save, staged, moved)) for save, staged in in_order]
    events = [(save.plan.event, save, staged) for save, staged in left if save.plan.event is not None]
    for event, save, staged in sorted(events, key=lambda each: each[0].number):
        for each in staged:
            _move(connection, _events_of(save, event, each, after=moved.events), each, "the outbox")
            moved.events += each.rows
    for save, staged in in_order:
        for each in staged:
            connection.execute(SQL("DROP TABLE {}").format(_staging(save, each)))
    return moved


def _move_business_rows(
    connection: psycopg.Connection, save: Save, staged: Sequence[Staged], moved: Moved
) -> Sequence[Staged]:
    """Write and delete the rows of a table; return what of the staged rows makes events."""
    table, upsert = save.plan.table, save.plan.upsert
    if table is None:
        return staged
    _refuse_repeated_keys(connection, save, staged)
    target = ".".join(table)
    if upsert is None or not upsert.may_pass_over:
        for each in staged:
            _move(connection, _insert(save, table, each), each, target)
            moved.rows += each.rows
        return staged
    # Deletes of all partitions first: a row may take what a deleted one had, by another unique index.
    deletes = [(0, 0)] * len(staged)
    if upsert.delete is not None:
        deletes = [_done(connection, _delete(save, table, upsert, each)) for each in staged]
    left = []
    for each, (deleted, not_there) in zip(staged, deletes, strict=True):
        written, stayed = _done(connection, _insert_and_pass_over(save, table, upsert, each))
        # Where no row may stay, a trigger has held it back.
        may_stay = upsert.only_changed or upsert.if_absent
        _refuse_lost(each, deleted + not_there + written + (stayed if may_stay else 0), target)
        moved.rows += written
        moved.deleted += deleted
        moved.passed_over += not_there + stayed
        left.append(replace(each, rows=deleted + written))
    return left


def _move(connection: psycopg.Connection, statement: Composed, staged: Staged, target: str) -> None:
    _refuse_lost(staged, connection.execute(statement).rowcount, target)


def _refuse_lost(staged: Staged, moved: int, target: str) -> None:
    if moved != staged.rows:
        raise BatchError(
            f"nothing of the batch was written: partition {staged.partition} staged {staged.rows} rows and {moved} "
            f"reached {target}. Has the database crashed meanwhile? Then run the batch again. Where a trigger refuses "
            "rows, it does so again"
        )


def _done(connection: psycopg.Connection, statement: Composed) -> tuple[int, int]:
    """Return how many staged rows were done, and how many passed over."""
    ((done, passed_over),) = connection.execute(statement).fetchall()
    return done, passed_over


def _insert(save: Save, table: tuple[str, str], staged: Staged) -> Composed:
    upsert = save.plan.upsert
    has_deletes = upsert is not None and upsert.delete is not None
    return INSERT.format(
        table=Identifier(*table),
        columns=SQL(", ").join(Identifier(column.name) for column in save.plan.columns),
        values=SQL(", ").join(_value(column) for column in save.plan.columns),
        staging=_staging(save, staged),
        where=SQL(" WHERE NOT staged.{}").format(Identifier(DELETE_FLAG)) if has_deletes else SQL(""),
        on_conflict=SQL("") if upsert is None else _on_conflict(save, upsert),
    )


def _on_conflict(save: Save, upsert: Upsert) -> Composed:
    keys = SQL(", ").join(Identifier(name) for name in upsert.keys)
    if upsert.if_absent:
        return LEAVE.format(keys=keys)
    # A row that consists of its key is written, too, so that the counts tell what happened to each.
    columns = [column for column in save.plan.columns if column.name not in upsert.keys] or save.plan.columns
    changes = [SQL("{0} = EXCLUDED.{0}").format(Identifier(column.name)) for column in columns]
    differs = SQL(" OR ").join(_differs(column) for column in columns)
    where = SQL(" WHERE {}").format(differs) if upsert.only_changed else SQL("")
    return UPDATE.format(keys=keys, changes=SQL(", ").join(changes), where=where)


def _differs(column: BusinessColumn) -> Composed:
    """Compare what is written with what is there: by value where Spark has the type, else by text."""
    kind, form = column.kind.removeprefix("_"), "{}"
    if column.cast is not None or kind == "json":  # json has no equality, and other types may have it loosely
        form = "CAST({} AS text)"
    elif kind in {"text", "varchar", "bpchar"}:
        form = '({} COLLATE "C")'  # a collation may take two texts for one
    both = form.format("target.{0}"), form.format("EXCLUDED.{0}")
    return SQL(" IS DISTINCT FROM ".join(both)).format(Identifier(column.name))


def _insert_and_pass_over(save: Save, table: tuple[str, str], upsert: Upsert, staged: Staged) -> Composed:
    flag = SQL("NOT staged.{}").format(Identifier(DELETE_FLAG)) if upsert.delete is not None else SQL("true")
    insert = _insert(save, table, staged)
    return INSERT_AND_PASS_OVER.format(insert=insert, is_written=flag, **_by_key(save, upsert, staged))


def _delete(save: Save, table: tuple[str, str], upsert: Upsert, staged: Staged) -> Composed:
    by_key = _by_key(save, upsert, staged)
    return DELETE_AND_PASS_OVER.format(table=Identifier(*table), flag=Identifier(DELETE_FLAG), **by_key)


def _by_key(save: Save, upsert: Upsert, staged: Staged) -> dict[str, Composable]:
    columns = [column for column in save.plan.columns if column.name in upsert.keys]
    same = [SQL("target.{} = {}").format(Identifier(column.name), _value(column)) for column in columns]
    return {
        "staging": _staging(save, staged),
        "same_keys": SQL(" AND ").join(same),
        "target_keys": SQL(", ").join(SQL("target.{}").format(Identifier(column.name)) for column in columns),
    }


def _value(column: BusinessColumn) -> Composable:
    form = "staged.{}" if column.cast is None else f"CAST(staged.{{}} AS {column.cast})"
    return SQL(form).format(Identifier(column.name))


def _events_of(save: Save, event: EventPlan, staged: Staged, *, after: int) -> Composed:
    options = save.options
    values: dict[str, Composable] = {name: Identifier(of_outbox(name)) for name in event.columns}
    same = {**event.same, "writer": options.app_id, "batch_id": options.version}
    values |= {name: Literal(value) for name, value in same.items()}
    if options.rate is not None and event.available_at is None:
        values["available_at"] = IN_TURN.format(after=after, rate=options.rate)
    return MOVE_EVENTS.format(
        message=Identifier(options.outbox_schema, "message"),
        columns=SQL(", ").join(Identifier(name) for name in values),
        values=SQL(", ").join(values.values()),
        staging=_staging(save, staged),
    )


def put_into_quarantine(
    connection: psycopg.Connection, save: Save, quarantine: Quarantine, staged: Sequence[Staged]
) -> None:
    """Write the rows that no table takes into their table.

    Raises:
        RowError: they are more than may be.
    """
    options, table = save.options, ".".join(save.plan.table or ())
    bad = [(each.partition, row) for each in staged for row in each.bad]
    if len(bad) > quarantine.most:
        raise RowError(
            f"nothing of the batch was written: it has {len(bad)} bad rows for {table}, and maxBadRows allows "
            f"{quarantine.most}. The first is row {bad[0][1].position + 1} of partition {bad[0][0]}: {bad[0][1].reason}"
        )
    rows = [
        (options.app_id, options.version, table, partition, row.position, row.reason, row.row_json)
        for partition, row in bad
    ]
    with connection.cursor() as cursor:
        cursor.executemany(PUT_INTO_QUARANTINE.format(table=Identifier(*quarantine.table)), rows)


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
    if save.plan.upsert is None or not staged:
        return
    key_names = save.plan.upsert.keys
    keys = SQL(", ").join(Identifier(name) for name in key_names)
    values = SQL(", ").join(
        SQL("{} AS {}").format(_value(column), Identifier(column.name))
        for column in save.plan.columns
        if column.name in key_names
    )
    every_row = SQL(" UNION ALL ").join(
        SQL("SELECT {} FROM {} AS staged").format(values, _staging(save, each)) for each in staged
    )
    found = connection.execute(FIND_REPEATED_KEY.format(keys=keys, staged=every_row)).fetchone()
    if found is not None:
        raise BatchError(
            f"nothing of the batch was written: {found[1]} rows for {'.'.join(save.plan.table or ())} have the same "
            f"upsertKeys, {', '.join(key_names)} {found[0]}. Leave one of them in the DataFrame"
        )


def _ids_of(save: Save, event: EventPlan, staged: Staged) -> Composed:
    key = Identifier(of_outbox("aggregate_id")) if "aggregate_id" in event.texts else SQL("NULL::text")
    return SQL("SELECT {} AS message_id, {} AS aggregate_id FROM {}").format(
        Identifier(of_outbox("message_id")), key, _staging(save, staged)
    )


def _staging(save: Save, staged: Staged) -> Identifier:
    return Identifier(save.options.staging_schema, staged.table or "")
