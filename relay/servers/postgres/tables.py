"""The outbox's tables as an operator's function uses them: a connection, and the schema that its statements name."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg.abc import Params
from psycopg.rows import TupleRow, class_row
from psycopg.sql import SQL, Composed, Identifier

from relay.servers.postgres.database import one

Row = TypeVar("Row")
Statement = SQL | Composed
Values = Params | None


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables in a schema, on a connection. `parts` are what a statement has in braces besides `{schema}`."""

    connection: psycopg.Connection
    schema: str

    def sql(self, statement: Statement, /, **parts: Any) -> Composed:
        """Return a statement about these tables; what is composed already stays as it is."""
        if isinstance(statement, Composed):
            return statement
        return statement.format(schema=Identifier(self.schema), **parts)

    def execute(self, statement: Statement, values: Values = None, /, **parts: Any) -> psycopg.Cursor[TupleRow]:
        """Run a statement, and return its cursor."""
        return self.connection.execute(self.sql(statement, **parts), values)

    def one(self, statement: Statement, values: Values = None, /, **parts: Any) -> TupleRow:
        """Return the row of a statement that always returns one; LookupError when it returned no row."""
        return one(self.execute(statement, values, **parts).fetchone())

    def row(self, kind: type[Row], statement: Statement, values: Values = None, /, **parts: Any) -> Row | None:
        """Return the first row, its columns as the fields of `kind`; None when there is no row."""
        with self.connection.cursor(row_factory=class_row(kind)) as cursor:
            return cursor.execute(self.sql(statement, **parts), values).fetchone()

    def rows(self, kind: type[Row], statement: Statement, values: Values = None, /, **parts: Any) -> list[Row]:
        """Return the rows, their columns as the fields of `kind`."""
        with self.connection.cursor(row_factory=class_row(kind)) as cursor:
            return cursor.execute(self.sql(statement, **parts), values).fetchall()

    def transaction(self) -> AbstractContextManager[psycopg.Transaction]:
        """Return a block that commits at its end, or a savepoint within a transaction."""
        return self.connection.transaction()
