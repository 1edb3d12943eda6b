"""The statements that write rows, and the writers for psycopg.

A statement names only the columns that a writer may fill, so the role `outbox_writer` of config/roles.sql
needs no more.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus, TransactionStatus

from relay.outbox.errors import NoTransactionError
from relay.outbox.row import Row

# One row by VALUES takes 0.17 ms of a round trip on loopback, by unnest 0.30. 100 rows take 2.2 ms by unnest, and 5.5
# by VALUES with 1,200 parameters. Each is one text for any number of rows, so it is prepared once.
INSERT_ONE = """
    INSERT INTO {schema}.message (
        message_id, aggregate_type, aggregate_id, event_type, exchange, routing_key, headers, content_type,
        payload, payload_bytes, available_at, trace_context)
    VALUES (
        {message_id}, {aggregate_type}, {aggregate_id}, {event_type}, {exchange}, {routing_key}, {headers},
        {content_type}, {payload}, {payload_bytes}, {available_at}, {trace_context})
"""

# ORDER BY: ids are given in the order of the events, and ids are the order of a key.
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

COPY = "COPY {schema}.message ({columns}) FROM STDIN"


# PostgreSQL ends the connection at a message of 1 GiB; 40 payloads of 16 MiB are one, as bytea is sent as hex digits.
STATEMENT_BYTES = 16 * 1024 * 1024


def write(
    connection: psycopg.Connection[Any], rows: Sequence[Row], schema: str, *, by_copy: bool, autocommit: bool
) -> None:
    if not rows:
        return
    if not autocommit:
        require_transaction(connection)
    # A cursor of our own class: the connection's may be one that wants another kind of placeholder.
    with psycopg.Cursor(connection) as cursor:
        if not (by_copy and _may_copy(connection)):
            for batch in batches(rows):
                cursor.execute(*_execution(batch, schema))
            return
        with cursor.copy(_copy_statement(schema, Row._fields)) as stream:
            for row in rows:
                stream.write_row(row)


async def write_async(
    connection: psycopg.AsyncConnection[Any], rows: Sequence[Row], schema: str, *, by_copy: bool, autocommit: bool
) -> None:
    if not rows:
        return
    if not autocommit:
        await require_transaction_async(connection)
    if by_copy and _may_copy(connection):
        await copy_async(connection, Row._fields, rows, schema)
        return
    async with psycopg.AsyncCursor(connection) as cursor:
        for batch in batches(rows):
            await cursor.execute(*_execution(batch, schema))


def require_transaction(connection: psycopg.Connection[Any]) -> None:
    """Check that what is written now is in a transaction; raises NoTransactionError."""
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
    async with psycopg.AsyncCursor(connection) as cursor, cursor.copy(_copy_statement(schema, columns)) as stream:
        for row in rows:
            await stream.write_row(row)


def batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yield the rows in order, as many at once as one statement takes."""
    first = size = 0
    for position, row in enumerate(rows):
        size_of_row = sum(len(value) for value in row if isinstance(value, str | bytes))
        if position > first and size + size_of_row > STATEMENT_BYTES:
            yield rows[first:position]
            first, size = position, 0
        size += size_of_row
    yield rows[first:]


def statement(row_count: int, schema: str, placeholder: Callable[[str], str]) -> str:
    """Return the INSERT for that many rows; `placeholder` writes a parameter's name as the driver wants it."""
    template = INSERT_ONE if row_count == 1 else INSERT_SEVERAL
    return template.format(schema=_quoted(schema), **{column: placeholder(column) for column in Row._fields})


def parameters(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the parameters that `statement` takes for these rows."""
    if len(rows) == 1:
        return rows[0]._asdict()
    return dict(zip(Row._fields, map(list, zip(*rows, strict=True)), strict=True))


def _has_unread_answers(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Return whether only answers that are still on their way tell if a transaction is open."""
    info = connection.info
    in_pipeline = info.pipeline_status is PipelineStatus.ON
    return connection.autocommit and in_pipeline and info.transaction_status is TransactionStatus.ACTIVE


def _require_transaction(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
        raise NoTransactionError


def _may_copy(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.info.pipeline_status is PipelineStatus.OFF  # the protocol has no COPY in a pipeline


def _execution(rows: Sequence[Row], schema: str) -> tuple[bytes, dict[str, Any]]:
    return statement(len(rows), schema, "%({})s".format).encode(), parameters(rows)


def _copy_statement(schema: str, columns: Sequence[str]) -> bytes:
    return COPY.format(schema=_quoted(schema), columns=", ".join(columns)).encode()


def _quoted(schema: str) -> str:
    return sql.Identifier(schema).as_string()
