"""What the driver reads of the database before any task runs: which tables are there, with which columns."""

from dataclasses import dataclass
from datetime import datetime
from typing import cast

import psycopg
from psycopg.sql import SQL, Identifier, Literal

from outbox_spark.errors import TableError, one_line
from outbox_spark.options import BatchOptions

FIND_TABLE = SQL("""
    SELECT class.oid, space.nspname, class.relname, class.relkind IN ('r', 'p'),
        has_any_column_privilege(class.oid, 'INSERT')
    FROM pg_class AS class JOIN pg_namespace AS space ON space.oid = class.relnamespace
    WHERE class.oid = to_regclass(%(name)s)
""")

# A domain is looked at as the type beneath it; its own checks run when the row is staged.
LIST_COLUMNS = SQL("""
    SELECT col.attname, format_type(col.atttypid, col.atttypmod), base.typname,
        base.typnamespace = 'pg_catalog'::regnamespace,
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

MAY_UPDATE = SQL("SELECT has_any_column_privilege(%(table)s::oid, 'UPDATE')")

LOOK_AROUND = SQL("""
    SELECT now(), has_column_privilege(%(ledger)s::regclass, 'row_counts', 'UPDATE'),
        has_column_privilege(to_regclass(%(states)s), 'state', 'SELECT')
""")

MAY_CREATE = SQL("""
    SELECT to_regnamespace(quote_ident(%(staging)s)) IS NOT NULL
        AND has_schema_privilege(to_regnamespace(quote_ident(%(staging)s)), 'CREATE')
""")


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the business table."""

    name: str
    type: str  # as SQL writes it: numeric(12,2)
    kind: str  # the name of the type alone: numeric
    is_builtin: bool
    modifier: int
    not_null: bool
    has_default: bool
    is_generated: bool
    is_unique: bool  # by an index on this column alone
    may_insert: bool

    @property
    def precision_and_scale(self) -> tuple[int, int] | None:
        """Digits and digits after the point of a numeric; None when it takes any."""
        if self.kind != "numeric" or self.modifier < 0:
            return None
        scale = (self.modifier - 4) & 0x7FF
        return (self.modifier - 4) >> 16 & 0xFFFF, scale - 0x800 if scale >= 0x400 else scale

    @property
    def max_characters(self) -> int | None:
        """How long a varchar or char may be, also in an array; None when it may be any length."""
        is_bounded = self.kind.removeprefix("_") in {"varchar", "bpchar"} and self.modifier >= 4
        return self.modifier - 4 if is_bounded else None


@dataclass(frozen=True, slots=True)
class Table:
    """The business table."""

    schema: str
    name: str
    columns: tuple[TableColumn, ...]
    unique: frozenset[frozenset[str]]  # the columns of each unique index
    may_update: bool

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


def describe(connection: psycopg.Connection, dbtable: str, *, named_by: str = "option dbtable") -> Table:
    """Describe the business table.

    Raises:
        TableError: it is missing, is no table, or may not be written by this user.
    """
    oid, schema, name = _find(connection, dbtable, named_by)
    rows = connection.execute(LIST_COLUMNS, {"table": oid}).fetchall()
    indexes = connection.execute(LIST_UNIQUE, {"table": oid}).fetchall()
    ((may_update,),) = connection.execute(MAY_UPDATE, {"table": oid}).fetchall()
    unique = frozenset(frozenset(names) for (names,) in indexes)
    return Table(schema, name, tuple(TableColumn(*row) for row in rows), unique, may_update)


def require_outbox(connection: psycopg.Connection, options: BatchOptions) -> datetime:
    """Check that outbox and ledger are there and may be used as this batch has to; tell the database's time.

    Raises:
        TableError: with what is missing and the remedy.
    """
    names = ("message", "message_state", "batch")
    message, states, ledger = (Identifier(options.outbox_schema, name) for name in names)
    for table in (message, ledger):
        _find(connection, table.as_string(connection), "option outboxSchema", remedy=": run `relay migrate` on it")
    look = {"states": states.as_string(), "ledger": ledger.as_string()}
    now, may_note, may_count = connection.execute(LOOK_AROUND, look).fetchall()[0]
    user = Identifier(connection.info.user)
    if options.pieces is None:
        require_staging(connection, options)
    if options.pieces is not None and not may_note:
        grant = SQL("GRANT UPDATE (row_counts) ON {} TO {}").format(ledger, user)
        raise TableError(
            f"the rows of a partition cannot be noted in {options.outbox_schema}.batch: run what "
            f"`relay config roles` prints again, or {grant.as_string(connection)}"
        )
    if options.max_pending is not None and not may_count:
        grant = SQL("GRANT SELECT (state) ON {} TO {}").format(states, user)
        raise TableError(
            f"option maxPending: the pending rows of {options.outbox_schema}.message cannot be counted: run what "
            f"`relay config roles` prints again, or {grant.as_string(connection)}"
        )
    return cast(datetime, now)


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


def _find(connection: psycopg.Connection, name: str, named_by: str, *, remedy: str = "") -> tuple[int, str, str]:
    try:
        found = connection.execute(FIND_TABLE, {"name": name}).fetchone()
    except psycopg.Error as error:
        # For example "cross-database references are not implemented: a.b.c".
        raise TableError(f"table {name} of {named_by}: {one_line(error)}") from None
    if found is None:
        raise TableError(f"table {name} of {named_by} does not exist in database {connection.info.dbname!r}{remedy}")
    oid, schema, relation, is_table, may_insert = found
    if not is_table:
        raise TableError(f"{schema}.{relation} of {named_by} is no table")
    if not may_insert:
        user = Literal(connection.info.user).as_string(connection)
        raise TableError(f"user {user} may not INSERT into {schema}.{relation} of {named_by}")
    return oid, schema, relation
