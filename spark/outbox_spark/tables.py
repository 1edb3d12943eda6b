"""Which tables are there, and whether a DataFrame fits them: by types alone, on the driver, before any task runs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

import psycopg
from psycopg.sql import SQL, Identifier
from pyspark.sql import types as spark

from outbox_spark.asked import BatchOptions, RowOptions, WriteOptions
from outbox_spark.errors import ColumnError, TableError, one_line
from outbox_spark.fits import MESSAGE_KEY, TableColumn, fits, is_json, is_text_for, takes_of
from outbox_spark.plan import BusinessColumn, DeleteEvents, EventPlan, Maker, Plan, Quarantine, Upsert

FIND_TABLE = SQL("""
    SELECT class.oid, space.nspname, class.relname, class.relkind IN ('r', 'p'),
        has_any_column_privilege(class.oid, 'INSERT')
    FROM pg_class AS class JOIN pg_namespace AS space ON space.oid = class.relnamespace
    WHERE class.oid = to_regclass(%(name)s)
""")

# A domain is looked at as the type beneath it; its own checks run when the row is staged.
LIST_COLUMNS = SQL("""
    SELECT col.attname, format_type(col.atttypid, col.atttypmod), base.typname,
        base.typnamespace = 'pg_catalog'::regnamespace, format_type(base.oid, -1),
        format_type(base.oid, CASE type.typtype WHEN 'd' THEN type.typtypmod ELSE col.atttypmod END),
        CASE type.typtype WHEN 'd' THEN type.typtypmod ELSE col.atttypmod END,
        col.attnotnull, col.atthasdef OR col.attidentity <> '',
        col.attgenerated <> '' OR col.attidentity = 'a',
        EXISTS (
            SELECT FROM pg_index AS index
            WHERE index.indrelid = col.attrelid AND index.indisunique AND index.indimmediate AND index.indisvalid
                AND index.indnkeyatts = 1 AND index.indkey[0] = col.attnum AND index.indpred IS NULL
        ),
        has_column_privilege(col.attrelid, col.attnum, 'INSERT')
    FROM pg_attribute AS col
    JOIN pg_type AS type ON type.oid = col.atttypid
    JOIN pg_type AS base ON base.oid = CASE type.typtype WHEN 'd' THEN type.typbasetype ELSE type.oid END
    WHERE col.attrelid = %(table)s AND col.attnum > 0 AND NOT col.attisdropped
    ORDER BY col.attnum
""")

LIST_UNIQUE = SQL("""
    SELECT array_agg(col.attname::text)
    FROM pg_index AS index JOIN pg_attribute AS col
        ON col.attrelid = index.indrelid AND col.attnum = ANY ((index.indkey::int2[])[0:index.indnkeyatts - 1])
    WHERE index.indrelid = %(table)s AND index.indisunique AND index.indimmediate AND index.indisvalid
        AND index.indpred IS NULL AND index.indexprs IS NULL
    GROUP BY index.indexrelid
""")

LIST_RIGHTS = SQL("""
    SELECT name FROM unnest(ARRAY['SELECT', 'UPDATE', 'DELETE']) AS name
    WHERE CASE name WHEN 'DELETE' THEN has_table_privilege(%(table)s::oid, name)
        ELSE has_any_column_privilege(%(table)s::oid, name) END
""")

LOOK_AROUND = SQL("SELECT now(), has_column_privilege(to_regclass(%(states)s), 'state', 'SELECT')")

MAY_NOTE = SQL("SELECT has_column_privilege(%(ledger)s::regclass, 'row_counts', 'UPDATE')")

MAY_CREATE = SQL("""
    SELECT to_regnamespace(quote_ident(%(staging)s)) IS NOT NULL
        AND has_schema_privilege(to_regnamespace(quote_ident(%(staging)s)), 'CREATE')
""")

EVENT_TEXTS = ("aggregate_type", "aggregate_id", "event_type", "exchange", "routing_key", "content_type")
EVENT_FIELDS = ("message_id", *EVENT_TEXTS, "headers", "payload", "available_at", MESSAGE_KEY)

# What the table of bad rows has, by column.
BAD_ROW = {
    "app_id": "text",
    "version": "bigint",
    "table_name": "text",
    "partition": "integer",
    "position": "bigint",
    "reason": "text",
    "row_json": "text",
}

MADE_LATER = (
    ". {} makes it when the event is made already, so no event can have it. Make ids in Spark, for example with uuid()"
)

FIELD_OF_OPTION = {
    "aggregateIdColumn": "aggregate_id",
    "sequenceColumn": MESSAGE_KEY,
    "payloadColumn": "payload",
    "headersColumn": "headers",
    "availableAtColumn": "available_at",
}
Fields = dict[str, tuple[int, spark.DataType]]  # by name: the place in the DataFrame, and the type


@dataclass(frozen=True, slots=True)
class Table:
    """The business table."""

    schema: str
    name: str
    columns: tuple[TableColumn, ...]
    unique: frozenset[frozenset[str]]  # the columns of each unique index
    rights: frozenset[str]  # SELECT, UPDATE and DELETE, as far as the user has them
    user: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    def grant(self, right: str, column: str | None = None) -> str:
        """Return the statement that gives the user a right."""
        what = right if column is None else f"{right} ({Identifier(column).as_string()})"
        table, user = Identifier(self.schema, self.name).as_string(), Identifier(self.user).as_string()
        return f"GRANT {what} ON {table} TO {user}"

    def index(self, columns: Sequence[str]) -> str:
        """Return the statement that makes a unique index."""
        names = ", ".join(Identifier(name).as_string() for name in columns)
        return f"CREATE UNIQUE INDEX ON {Identifier(self.schema, self.name).as_string()} ({names})"


def describe(connection: psycopg.Connection, dbtable: str, *, named_by: str = "option dbtable") -> Table:
    """Describe the business table.

    Raises:
        TableError: it is missing, is no table, or may not be written by this user.
    """
    oid, schema, name = _find(connection, dbtable, named_by)
    rows = _columns_of(connection, oid)
    indexes = connection.execute(LIST_UNIQUE, {"table": oid}).fetchall()
    unique = frozenset(frozenset(names) for (names,) in indexes)
    rights = frozenset(right for (right,) in connection.execute(LIST_RIGHTS, {"table": oid}).fetchall())
    return Table(schema, name, tuple(TableColumn(*row) for row in rows), unique, rights, connection.info.user)


def require_outbox(connection: psycopg.Connection, options: BatchOptions) -> datetime:
    """Check that outbox and ledger exist and that this batch may use them; return the database's time.

    Raises:
        TableError: with what is missing and the remedy.
    """
    names = ("message", "message_state", "batch")
    message, states, ledger = (Identifier(options.outbox_schema, name) for name in names)
    for table in (message, ledger):
        _find(
            connection,
            table.as_string(connection),
            "option outboxSchema",
            remedy=": run `relay migrate` on it",
            role=f"{options.outbox_schema}_spark",
        )
    ((now, may_count),) = connection.execute(LOOK_AROUND, {"states": states.as_string()}).fetchall()
    user = Identifier(connection.info.user)
    if options.pieces is None:
        require_staging(connection, options)
    else:
        require_noting(connection, options)
    if options.max_pending is not None and not may_count:
        grant = SQL("GRANT SELECT (state) ON {} TO {}").format(states, user)
        raise TableError(
            f"option maxPending: the pending rows of {options.outbox_schema}.message cannot be counted: run what "
            f"`relay config roles` prints again, or {grant.as_string(connection)}"
        )
    return cast(datetime, now)


def require_quarantine(
    connection: psycopg.Connection, options: RowOptions, *, columns: int, named_by: str = "option badRowsTable"
) -> Quarantine | None:
    """Check the table of bad rows; None when a bad row fails the batch.

    Args:
        columns: how many the DataFrame has.
    Raises:
        TableError: it is missing, or lacks a column; with the statement that makes it.
    """
    if (name := options.bad_rows_table) is None:
        return None
    definitions = [f"{column} {kind} NOT NULL" for column, kind in BAD_ROW.items()]
    remedy = f": CREATE TABLE {name} ({', '.join(definitions)}, quarantined_at timestamptz DEFAULT now())"
    oid, schema, relation = _find(connection, name, named_by, remedy=remedy)
    kinds = {column.name: column.unlimited for column in (TableColumn(*row) for row in _columns_of(connection, oid))}
    for column, kind in BAD_ROW.items():
        if kinds.get(column) != kind:
            raise TableError(f"{schema}.{relation} of {named_by} has no column {column} {kind}{remedy}")
    return Quarantine((schema, relation), options.max_bad_rows, columns)


def _columns_of(connection: psycopg.Connection, oid: int) -> list[tuple[Any, ...]]:
    return connection.execute(LIST_COLUMNS, {"table": oid}).fetchall()


def require_noting(connection: psycopg.Connection, options: BatchOptions) -> None:
    """Check that the ledger's row may be changed when the number of written rows is known.

    Raises:
        TableError: with the remedy.
    """
    ledger = Identifier(options.outbox_schema, "batch")
    ((may_note,),) = connection.execute(MAY_NOTE, {"ledger": ledger.as_string()}).fetchall()
    if not may_note:
        user = Identifier(connection.info.user)
        grant = SQL("GRANT UPDATE (row_counts) ON {} TO {}").format(ledger, user)
        raise TableError(
            f"how many rows are written cannot be noted in {options.outbox_schema}.batch: run what "
            f"`relay config roles` prints again, or {grant.as_string(connection)}"
        )


def require_staging(connection: psycopg.Connection, options: BatchOptions) -> None:
    """Check that staging tables can be made.

    Raises:
        TableError: with the remedy.
    """
    ((may_create,),) = connection.execute(MAY_CREATE, {"staging": options.staging_schema}).fetchall()
    if not may_create:
        user = Identifier(connection.info.user)
        grant = SQL("GRANT USAGE, CREATE ON SCHEMA {} TO {}").format(Identifier(options.staging_schema), user)
        raise TableError(
            f"staging tables cannot be made in schema {options.staging_schema!r}: create it, or run "
            f"{grant.as_string(connection)}, or name another with the option stagingSchema"
        )


def _find(
    connection: psycopg.Connection, name: str, named_by: str, *, remedy: str = "", role: str | None = None
) -> tuple[int, str, str]:
    """Find a table that may be written.

    Args:
        remedy: where it does not exist.
        role: has every right to it.
    """
    user = Identifier(connection.info.user)
    try:
        found = connection.execute(FIND_TABLE, {"name": name}).fetchone()
    except psycopg.errors.InsufficientPrivilege as error:
        (schema,) = connection.execute("SELECT (parse_ident(%s))[1]", [name]).fetchall()[0]
        usage = SQL("USAGE ON SCHEMA {}").format(Identifier(schema)) if role is None else Identifier(role)
        grant = SQL("GRANT {} TO {}").format(usage, user).as_string(connection)
        raise TableError(f"table {name} of {named_by}: {one_line(error)}: {grant}") from None
    except psycopg.Error as error:
        # For example "cross-database references are not implemented: a.b.c".
        raise TableError(f"table {name} of {named_by}: {one_line(error)}") from None
    if found is None:
        raise TableError(f"table {name} of {named_by} does not exist in database {connection.info.dbname!r}{remedy}")
    oid, schema, relation, is_table, may_insert = found
    if not is_table:
        raise TableError(f"{schema}.{relation} of {named_by} is no table")
    if not may_insert:
        insert = SQL("INSERT ON {}").format(Identifier(schema, relation)) if role is None else Identifier(role)
        grant = SQL("GRANT {} TO {}").format(insert, user).as_string(connection)
        raise TableError(
            f"user {connection.info.user!r} may not INSERT into {schema}.{relation} of {named_by}: {grant}"
        )
    return oid, schema, relation


def plan_write(schema: spark.StructType, table: Table, options: WriteOptions) -> Plan:
    """Decide which column goes where, when each row is a row of the table and an event.

    Raises:
        ColumnError: with every fault at once, each naming its column.
    """
    fields = _fields(schema)
    faults = _named_twice(schema) + _missing(fields, table, options)
    named = {*options.named_columns().values(), *options.payload_columns, options.rows.delete_column}
    columns = _business_columns(fields, table, faults, others=named, keys=options.rows.keys)
    upsert = _upsert(fields, table, options.rows, faults)
    if options.pieces is not None:
        faults += [
            f"column {column.name!r} is text in the DataFrame and {column.cast} in {table}. Only atomic=batch casts it"
            for column in columns
            if column.cast is not None
        ]
    payload = _payload(columns, options)
    faults += _unfit_for_event(fields, payload, options)
    is_bytes = options.payload_column is not None and _is_bytes(fields, options.payload_column)
    if is_bytes and options.content_type is None:
        faults.append(f"column {options.payload_column!r} of option payloadColumn is bytes, and takes contentType")
    sequence = options.sequence_column
    unique = {column.name for column in table.columns if column.is_unique}
    if options.pieces is not None and sequence is not None and sequence not in unique:
        faults.append(
            f"column {sequence!r} of option sequenceColumn has no unique index in {table}. With a transaction for each "
            "partition nothing else finds its repeats: make one on this column alone, or write with atomic=batch"
        )
    _raise(faults)
    same = {
        "aggregate_type": options.aggregate_type,
        "event_type": options.event_type,
        "exchange": options.exchange,
        "routing_key": options.routing_key,
        "content_type": options.content_type,
    }
    deletes = None
    if upsert is not None and upsert.delete is not None:
        kinds = options.delete_event_type or "", same.pop("event_type") or ""
        deletes = DeleteEvents(upsert.delete, *kinds, payload=tuple(fields[name][0] for name in upsert.keys))
    event = EventPlan(
        texts={"aggregate_id": fields[options.aggregate_id_column][0]},
        same={name: value for name, value in same.items() if value is not None},
        payload=tuple(fields[name][0] for name in payload),
        payload_is_whole=options.payload_column is not None,
        headers=None if options.headers_column is None else fields[options.headers_column][0],
        available_at=None if options.available_at_column is None else fields[options.available_at_column][0],
        sequence=None if sequence is None else fields[sequence][0],
        # An INSERT refuses repeats by the index. The keys alone are known to be unique in an upsert.
        sequence_is_unique=sequence is None or (sequence in unique if upsert is None else upsert.keys == (sequence,)),
        deletes=deletes,
        payload_is_bytes=is_bytes,
    )
    return Plan((table.schema, table.name), tuple(columns), upsert, event)


def plan_rows(schema: spark.StructType, table: Table, options: RowOptions) -> Plan:
    """Decide which column goes where, when each row is a row of the table, new or with keys that it has already.

    Raises:
        ColumnError: with every fault at once, each naming its column.
    """
    fields = _fields(schema)
    faults = _named_twice(schema)
    columns = _business_columns(fields, table, faults, others={options.delete_column}, keys=options.keys)
    upsert = _upsert(fields, table, options, faults)
    _raise(faults)
    return Plan((table.schema, table.name), tuple(columns), upsert)


def _upsert(fields: Fields, table: Table, options: RowOptions, faults: list[str]) -> Upsert | None:
    """Decide how rows that are there are found; None when every row is inserted."""
    keys, delete = options.keys, options.delete_column
    if not keys:
        return None
    faults += [f"column {name!r} of upsertKeys is not in the DataFrame" for name in keys if name not in fields]
    if frozenset(keys) not in table.unique:
        faults.append(
            f"upsertKeys {', '.join(keys)}: no unique index of {table} is on just these columns: {table.index(keys)}"
        )
    needed = ["SELECT", *([] if options.if_absent else ["UPDATE"]), *([] if delete is None else ["DELETE"])]
    if not table.rights.issuperset(needed):
        faults.append(f"upsertKeys takes more rights to {table} than INSERT: {table.grant(', '.join(needed))}")
    if delete is not None and not isinstance(fields.get(delete, (0, None))[1], spark.BooleanType):
        faults.append(f"column {delete!r} of deleteColumn is no boolean column of the DataFrame")
    if delete in {column.name for column in table.columns}:
        faults.append(f"column {delete!r} of deleteColumn is in {table}, too: rename it in the DataFrame")
    place = None if delete not in fields else fields[delete][0]
    return Upsert(keys, only_changed=options.only_changed, if_absent=options.if_absent, delete=place)


def plan_events(schema: spark.StructType, same: Mapping[str, str], *, number: int, maker: Maker | None = None) -> Plan:
    """Decide what becomes of columns whose names are those of outbox.message.

    Args:
        same: what all rows have in common.
        number: how many events of the batch were planned before.
        maker: the function that makes the columns.
    Raises:
        ColumnError: with every fault at once, each naming its column.
    """
    fields = _fields(schema)
    faults = _named_twice(schema)
    unknown = fields.keys() - set(EVENT_FIELDS)
    faults += [f"column {name!r} is no column of an event: {', '.join(EVENT_FIELDS)}" for name in sorted(unknown)]
    if MESSAGE_KEY in fields and "message_id" in fields:
        faults.append(f"message_id and {MESSAGE_KEY} exclude each other")
    for name in ("aggregate_type", "event_type", "payload"):
        if name not in fields and name not in same:
            faults.append(f"{name} is missing: give it, or a column of that name")
    is_bytes = _is_bytes(fields, "payload")
    if is_bytes and "content_type" not in fields and "content_type" not in same:
        faults.append("a payload of bytes takes content_type: give it, or a column of that name")
    for name, (_, data_type) in fields.items():
        does_take, takes = takes_of(name)
        if name not in unknown and not does_take(data_type):
            faults.append(f"column {name!r} takes {takes}, not {data_type.simpleString()}")
    _raise(faults)
    places = {name: place for name, (place, _) in fields.items()}
    event = EventPlan(
        texts={name: places[name] for name in EVENT_TEXTS if name in places},
        same=dict(same),
        payload=(places["payload"],),
        payload_is_whole=True,
        headers=places.get("headers"),
        available_at=places.get("available_at"),
        message_id=places.get("message_id"),
        sequence=places.get(MESSAGE_KEY),
        sequence_is_unique=MESSAGE_KEY not in places,
        number=number,
        id_tells_batch=MESSAGE_KEY not in places,
        maker=maker,
        payload_is_bytes=is_bytes,
    )
    return Plan(event=event)


def _fields(schema: spark.StructType) -> Fields:
    return {field.name: (index, field.dataType) for index, field in enumerate(schema.fields)}


def _is_bytes(fields: Fields, name: str) -> bool:
    return name in fields and isinstance(fields[name][1], spark.BinaryType)


def _raise(faults: list[str]) -> None:
    if faults:
        raise ColumnError("; ".join(faults))


def _business_columns(
    fields: Fields, table: Table, faults: list[str], *, others: Collection[str | None], keys: Collection[str]
) -> list[BusinessColumn]:
    target = {column.name: column for column in table.columns}
    columns = []
    for name, (index, data_type) in fields.items():
        if name in target:
            column = target[name]
            faults += _misfit(name, data_type, column, table)
            staged = _staged(index, data_type, column)
            # A NULL is no other row's NULL to a unique index: what has one would be inserted again by every run.
            columns.append(replace(staged, not_null=staged.not_null or name in keys))
        elif name not in others:
            faults.append(f"column {name!r} is not in {table}, and no option names it")
    faults += [
        f"column {column.name!r} of {table} is NOT NULL without a default, and the DataFrame has no such column"
        for column in table.columns
        if column.not_null and not column.has_default and not column.is_generated and column.name not in fields
    ]
    if not columns:
        faults.append(f"no column of the DataFrame is in {table}")
    return columns


def _staged(index: int, data_type: spark.DataType, column: TableColumn) -> BusinessColumn:
    """Return how a column is staged: as its own type, or as text that the commit casts."""
    staged = BusinessColumn(
        column.name,
        index,
        column.type,
        column.kind,
        not_null=column.not_null,
        max_characters=column.max_characters,
        max_digits=column.max_digits,
    )
    if column.has_spark_type:
        return staged
    is_array = isinstance(data_type, spark.ArrayType)
    text, bare = Identifier(column.name).as_string(), column.unlimited
    # The checks of a domain are made by a cast to it.
    is_kept = f"num_nonnulls(CAST({text} AS {column.type})) >= 0"
    if column.modifier >= 0:
        # A cast to a type with a modifier cuts and rounds; without one it keeps all, and both must be the same.
        is_kept += f" AND CAST({text} AS {bare}) IS NOT DISTINCT FROM CAST({text} AS {column.limited})"
    name = Identifier(f"column {index} fits {column.limited}"[:60]).as_string()
    return replace(
        staged,
        type="text[]" if is_array else "text",
        kind="_text" if is_array else "text",
        cast=bare,
        check=f"CONSTRAINT {name} CHECK ({is_kept})",
    )


def _named_twice(schema: spark.StructType) -> list[str]:
    names = schema.fieldNames()
    return [
        f"column {name!r} is in the DataFrame more than once" for name in sorted(set(names)) if names.count(name) > 1
    ]


def _missing(fields: Fields, table: Table, options: WriteOptions) -> list[str]:
    named = [*options.named_columns().items(), *(("payloadColumns", name) for name in options.payload_columns)]
    made_by_database = {column.name for column in table.columns if column.has_default or column.is_generated}
    return [
        f"column {name!r} of option {option} is not in the DataFrame"
        + (MADE_LATER.format(table) if name in made_by_database else "")
        for option, name in named
        if name not in fields
    ]


def _payload(columns: list[BusinessColumn], options: WriteOptions) -> tuple[str, ...]:
    if options.payload_column is not None:
        return (options.payload_column,)
    return options.payload_columns or tuple(column.name for column in columns)


def _misfit(name: str, data_type: spark.DataType, column: TableColumn, table: Table) -> list[str]:
    if column.is_generated:
        return [f"column {name!r} of {table} is generated by the database and cannot be written: leave it out"]
    if not column.may_insert:
        return [f"column {name!r} of {table} may not be written: {table.grant('INSERT', name)}"]
    both = f"column {name!r} is {data_type.simpleString()} in the DataFrame and {column.type} in {table}"
    if column.has_spark_type:
        return [] if fits(data_type, column) else [f"{both}: not every value fits unchanged, cast it first"]
    if is_text_for(data_type, column):
        return []
    array = ", or an array of such text" if column.kind.startswith("_") else ""
    return [f"{both}: give it as a string that PostgreSQL reads as {column.unlimited}{array}"]


def _unfit_for_event(fields: Fields, payload: tuple[str, ...], options: WriteOptions) -> list[str]:
    faults = []
    for option, name in options.named_columns().items():
        does_take, takes = takes_of(FIELD_OF_OPTION[option])
        if name in fields and not does_take(fields[name][1]):
            faults.append(f"column {name!r} of option {option} takes {takes}, not {fields[name][1].simpleString()}")
    faults += [
        f"column {name!r} is {fields[name][1].simpleString()}, which has no JSON: cast it, or leave it out with the "
        "option payloadColumns"
        for name in payload
        if name in fields and not is_json(fields[name][1])
    ]
    return faults
