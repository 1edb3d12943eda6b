"""The statements that write rows, and the writers for psycopg.

A statement names only the columns that a writer may fill, so the role `outbox_writer` of config/roles.sql needs rights
on no other column.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus, TransactionStatus

from relay.outbox import watch
from relay.outbox.row import NewRow

# On loopback, a round trip with one row takes 0.17 ms by VALUES and 0.30 ms by unnest. With 100 rows it takes 2.2 ms by
# unnest, and 5.5 ms by VALUES with 1,200 parameters. INSERT_SEVERAL is the same text for any number of rows, so the
# driver prepares it once.
INSERT_ONE = """
    INSERT INTO {schema}.message (
        message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type,
        payload, payload_bytes, available_at, trace_context)
    VALUES (
        {message_id}, {aggregate_type}, {aggregate_id}, {event_type}, {exchange}, {routing_key}, {headers},
        {content_type}, {payload}, {payload_bytes}, {available_at}, {trace_context})
"""

# The ids define the order of a key. ORDER BY makes the server assign them in the order of the events.
INSERT_SEVERAL = """
    INSERT INTO {schema}.message (
        message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type,
        payload, payload_bytes, available_at, trace_context)
    SELECT
        message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers::jsonb, content_type,
        payload::json, payload_bytes, available_at, trace_context::jsonb
    FROM unnest(
        CAST({message_id} AS uuid[]), CAST({aggregate_type} AS text[]), CAST({aggregate_id} AS text[]),
        CAST({event_type} AS text[]), CAST({exchange} AS text[]), CAST({routing_key} AS text[]),
        CAST({headers} AS text[]), CAST({content_type} AS text[]), CAST({payload} AS text[]),
        CAST({payload_bytes} AS bytea[]), CAST({available_at} AS timestamptz[]), CAST({trace_context} AS text[])
    ) WITH ORDINALITY AS event (
        message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type,
        payload, payload_bytes, available_at, trace_context, position)
    ORDER BY position
"""

# By SQLSTATE: undefined_table, invalid_schema_name, insufficient_privilege.
MISSING = "`relay migrate` makes the tables of schema {schema}; `add` takes another name as schema=..."
REMEDIES = {
    "42P01": MISSING,
    "3F000": MISSING,
    "42501": "the login needs the role outbox_writer of schema {schema}, which `relay config roles` prints",
}

COPY = "COPY {schema}.message ({columns}) FROM STDIN"


# PostgreSQL ends the connection at a protocol message of 1 GiB. 40 payloads of 16 MiB make one, as bytea is sent as hex
# digits.
STATEMENT_BYTES = 16 * 1024 * 1024


def write(
    connection: psycopg.Connection[Any], rows: Sequence[NewRow], schema: str, *, by_copy: bool, autocommit: bool
) -> None:
    if not rows:
        return
    if not autocommit:
        require_transaction(connection)
    # A cursor of psycopg's own class: the connection's cursor class may need another kind of placeholder.
    try:
        with psycopg.Cursor(connection) as cursor:
            if not (by_copy and may_copy(connection)):
                for batch in batches(rows):
                    cursor.execute(*execution(batch, schema))
                return
            with cursor.copy(copy_statement(schema, NewRow._fields)) as stream:
                for row in rows:
                    stream.write_row(row)
    except psycopg.Error as error:
        note_remedy(error, schema)
        raise


async def write_async(
    connection: psycopg.AsyncConnection[Any], rows: Sequence[NewRow], schema: str, *, by_copy: bool, autocommit: bool
) -> None:
    if not rows:
        return
    if not autocommit:
        await require_transaction_async(connection)
    try:
        if by_copy and may_copy(connection):
            await copy_async(connection, NewRow._fields, rows, schema)
            return
        async with psycopg.AsyncCursor(connection) as cursor:
            for batch in batches(rows):
                await cursor.execute(*execution(batch, schema))
    except psycopg.Error as error:
        note_remedy(error, schema)
        raise


def note_remedy(error: Exception, schema: str, remedies: Mapping[str, str] = REMEDIES) -> None:
    """Add the remedy to an error of the database, of whichever driver, that has a common one."""
    drivers = (error, getattr(error, "orig", None), error.__cause__)  # SQLAlchemy has it as `orig`, Django as the cause
    code = next((state for each in drivers if (state := getattr(each, "sqlstate", None))), None)
    if code is not None and code in remedies:
        error.add_note(remedies[code].format(schema=schema))


def require_transaction(connection: psycopg.Connection[Any]) -> None:
    """Check that the next statement runs in a transaction; raises NoTransactionError."""
    if _has_unread_answers(connection):
        with connection.pipeline():
            pass  # the end of an inner pipeline waits for the answers
    _require_transaction(connection)


async def require_transaction_async(connection: psycopg.AsyncConnection[Any]) -> None:
    if _has_unread_answers(connection):
        async with connection.pipeline():
            pass
    _require_transaction(connection)


async def copy_async(
    connection: psycopg.AsyncConnection[Any], columns: Sequence[str], rows: Iterable[Sequence[Any]], schema: str
) -> None:
    """Write rows of these columns by COPY."""
    async with psycopg.AsyncCursor(connection) as cursor, cursor.copy(copy_statement(schema, columns)) as stream:
        for row in rows:
            await stream.write_row(row)


def batches(rows: Sequence[NewRow]) -> Iterator[Sequence[NewRow]]:
    """Yield the rows in order, in batches that fit into one statement."""
    if len(rows) == 1:
        yield rows
        return
    first = size = 0
    for position, row in enumerate(rows):
        size_of_row = sum(len(value) for value in row if isinstance(value, str | bytes))
        if position > first and size + size_of_row > STATEMENT_BYTES:
            yield rows[first:position]
            first, size = position, 0
        size += size_of_row
    yield rows[first:]


def statement(schema: str, placeholder: str, *, is_one: bool) -> str:
    """Return the INSERT for one row or for several; `placeholder` is the driver's, such as `:{}` with the name in it.

    The names, and places where there is no name, are those of NewRow.
    """
    template = INSERT_ONE if is_one else INSERT_SEVERAL
    return template.format(schema=quoted(schema), **{column: placeholder.format(column) for column in NewRow._fields})


def parameters(rows: Sequence[NewRow]) -> Sequence[Any]:
    """Return the parameters of the statement for these rows, by place."""
    return rows[0] if len(rows) == 1 else [list(column) for column in zip(*rows, strict=True)]


def _has_unread_answers(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether it is still unknown if a transaction is open, because answers of the pipeline were not read yet."""
    if not connection.autocommit:
        return False
    info = connection.info
    return info.pipeline_status is PipelineStatus.ON and info.transaction_status is TransactionStatus.ACTIVE


def _require_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
        raise watch.no_transaction()


def may_copy(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.info.pipeline_status is PipelineStatus.OFF  # the protocol allows no COPY in a pipeline


def execution(rows: Sequence[NewRow], schema: str) -> tuple[bytes, Sequence[Any]]:
    return _statement(schema, is_one=len(rows) == 1), parameters(rows)


@lru_cache  # made again for each row, it costs a fifth of an INSERT on loopback
def _statement(schema: str, *, is_one: bool) -> bytes:
    return statement(schema.replace("%", "%%"), "%s", is_one=is_one).encode()


def copy_statement(schema: str, columns: Sequence[str]) -> bytes:
    return COPY.format(schema=quoted(schema), columns=", ".join(columns)).encode()


def quoted(schema: str) -> str:
    return sql.Identifier(schema).as_string()
