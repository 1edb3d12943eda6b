"""The writer for Django's connections: by its cursors, so that its query log and execute wrappers see each INSERT."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import Error

from relay.outbox import insert, watch
from relay.outbox.row import NewRow

if TYPE_CHECKING:
    from relay.outbox.write import DjangoConnection


def write(
    connection: "DjangoConnection", rows: Sequence[NewRow], schema: str, *, by_copy: bool, autocommit: bool
) -> None:
    """Write the rows in the transaction of the connection, which is open, and whose driver is psycopg 3."""
    if not rows:
        return
    if not autocommit:
        require_transaction(connection)
    try:
        with connection.cursor() as cursor:
            # Django calls its execute wrappers for no COPY, and one of them may forbid statements.
            if by_copy and insert.may_copy(connection.connection) and not connection.execute_wrappers:
                _copy(connection, cursor, rows, schema)
                return
            for batch in insert.batches(rows):
                statement, parameters = insert.execution(batch, schema)
                cursor.execute(statement.decode(), parameters)
    except (Error, psycopg.Error) as error:
        insert.note_remedy(error, schema)
        raise


def require_transaction(connection: "DjangoConnection") -> None:
    """Check that the next statement runs in a transaction of the application; raises NoTransactionError.

    A `TestCase` of Django opens transactions around each test, which production does not have. Django marks them, for
    `atomic(durable=True)`.
    """
    insert.require_transaction(connection.connection)
    blocks = connection.atomic_blocks
    if blocks and all(getattr(block, "_from_testcase", False) for block in blocks):
        raise watch.no_transaction()


def _copy(connection: "DjangoConnection", cursor: Any, rows: Sequence[NewRow], schema: str) -> None:
    connection.validate_no_broken_transaction()
    statement = insert.copy_statement(schema, NewRow._fields).decode()
    with connection.wrap_database_errors, cursor.copy(statement) as stream:
        for row in rows:
            stream.write_row(row)
