"""What the driver reads of the database before any task runs: which tables are there, with which columns."""

from dataclasses import dataclass
from datetime import datetime
from typing import cast

import psycopg
from psycopg.sql import SQL, Identifier, Literal

from outbox_spark.errors import TableError
from outbox_spark.session import one_line

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

LOOK_AROUND = SQL("""
    SELECT now(), to_regnamespace(quote_ident(%(schema)s)) IS NOT NULL
        AND has_schema_privilege(to_regnamespace(quote_ident(%(schema)s)), 'CREATE')
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
        """How long a varchar or char may be; None when it may be any length."""
        return self.modifier - 4 if self.kind in {"varchar", "bpchar"} and self.modifier >= 4 else None


@dataclass(frozen=True, slots=True)
class Table:
    """The business table."""

    schema: str
    name: str
    columns: tuple[TableColumn, ...]

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


def describe(connection: psycopg.Connection, dbtable: str) -> Table:
    """Describe the business table.

    Raises:
        TableError: it is missing, is no table, or may not be written by this user.
    """
    oid, schema, name = _find(connection, dbtable, "option dbtable")
    rows = connection.execute(LIST_COLUMNS, {"table": oid}).fetchall()
    return Table(schema, name, tuple(TableColumn(*row) for row in rows))


def require_outbox(connection: psycopg.Connection, outbox_schema: str, staging_schema: str) -> datetime:
    """Check that outbox and ledger are there and staging tables can be made; tell the database's time.

    Raises:
        TableError: with what is missing and the remedy.
    """
    for table in ("message", "batch"):
        name = Identifier(outbox_schema, table).as_string(connection)
        _find(connection, name, "option outboxSchema", remedy=": run `relay migrate` on it")
    now, may_create = connection.execute(LOOK_AROUND, {"schema": staging_schema}).fetchall()[0]
    if not may_create:
        grant = SQL("GRANT USAGE, CREATE ON SCHEMA {} TO {}").format(
            Identifier(staging_schema), Identifier(connection.info.user)
        )
        raise TableError(
            f"staging tables cannot be made in schema {staging_schema!r}: create it, or run "
            f"{grant.as_string(connection)}, or name another with the option stagingSchema"
        )
    return cast(datetime, now)


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
