"""Read the outbox by the connection or session of a test, in its transaction."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Identifier

from relay.outbox.insert import note_remedy
from relay.outbox.write import driver_of, is_of_asyncpg, not_a_target
from relay.testing.written import Written

if TYPE_CHECKING:
    from relay.outbox.write import Async, Sync

# One text a row: every driver has texts, and JSON's form of a time does not depend on the session's settings.
ROWS = """
    SELECT CAST(json_build_object(
        'event_type', event_type, 'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id, 'headers', headers,
        'message_id', message_id, 'exchange', exchange, 'routing_key', routing_key, 'content_type', content_type,
        'available_at', available_at, 'text', CAST(payload AS text), 'hex', encode(payload_bytes, 'hex'), 'state', state
    ) AS text)
    FROM {schema}.message_state
"""
READ = SQL(ROWS + "ORDER BY id")
READ_SINCE = SQL(ROWS + "WHERE id > %(since)s ORDER BY id")
# `created_at` is the moment at which the row's transaction has begun, and so one of this transaction is of `now()`.
# That holds in its savepoints, too, and needs no right on the table.
UNCOMMITTED = SQL("""
    SELECT event_type FROM {schema}.message_state
    WHERE state = 'pending' AND created_at = now() AND pg_current_xact_id_if_assigned() IS NOT NULL
    ORDER BY id
""")
# One row where later statements see no later commit. Its moment is that of the transaction's begin, so without one that
# goes on each statement has another.
SNAPSHOT = SQL("""
    SELECT CAST(now() AS text) WHERE current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
""")
EARLIEST, LATEST = (each.replace(tzinfo=UTC) for each in (datetime.min, datetime.max))  # noqa: DTZ901
CLEAR = SQL("DELETE FROM {schema}.message RETURNING event_type")


# By SQLSTATE: undefined_table, invalid_schema_name, insufficient_privilege.
MISSING = "`relay migrate` makes the tables of schema {schema}, as `migrate` of the kit; another name is for schema=..."
REMEDIES = {
    "42P01": MISSING,
    "3F000": MISSING,
    "42501": "the login needs SELECT on {schema}.message_state; for clear() also SELECT and DELETE on {schema}.message",
}


def run(target: "Sync", statement: SQL, schema: str) -> list[str]:
    """Run a statement in the transaction of the target; return the one column of its rows."""
    with _noting_remedies(schema):
        return _run(target, _text(statement, schema))


async def run_async(target: "Async", statement: SQL, schema: str) -> list[str]:
    with _noting_remedies(schema):
        return await _run_async(target, _text(statement, schema))


def _text(statement: SQL, schema: str) -> str:
    return statement.format(schema=Identifier(schema)).as_string()


@contextmanager
def _noting_remedies(schema: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        note_remedy(error, schema, REMEDIES)
        raise


def _run(target: "Sync", text: str) -> list[str]:
    driver = driver_of(target)
    if isinstance(driver, psycopg.Connection):
        # A cursor of psycopg's own class, and plain rows: the connection's may be others.
        with psycopg.Cursor(driver, row_factory=tuple_row) as cursor:
            cursor.execute(text.encode())
            return _column(cursor.fetchall())
    if sys.modules.get("sqlalchemy"):
        from relay.outbox import alchemy  # noqa: PLC0415

        if isinstance(target, alchemy.SYNC):
            return _run_alchemy(target, text)
    raise _refusal(target)


async def _run_async(target: "Async", text: str) -> list[str]:
    driver = driver_of(target)
    if isinstance(driver, psycopg.AsyncConnection):
        async with psycopg.AsyncCursor(driver, row_factory=tuple_row) as cursor:
            await cursor.execute(text.encode())
            return _column(await cursor.fetchall())
    if is_of_asyncpg(target):
        return _column(await target.fetch(text))
    if sys.modules.get("sqlalchemy"):
        from relay.outbox import alchemy  # noqa: PLC0415

        if isinstance(target, alchemy.ASYNC):
            rows: list[str] = await alchemy.run_sync(target, _run_alchemy, text)
            return rows
    raise _refusal(target)


def _refusal(target: object) -> TypeError:
    """Return the error for a target of the other kind, or of no kind."""
    driver, kind = driver_of(target), type(target).__name__
    is_sync, is_async = isinstance(driver, psycopg.Connection), isinstance(driver, psycopg.AsyncConnection)
    if sys.modules.get("sqlalchemy"):
        from relay.outbox import alchemy  # noqa: PLC0415

        is_sync, is_async = is_sync or isinstance(target, alchemy.SYNC), is_async or isinstance(target, alchemy.ASYNC)
    if is_async or is_of_asyncpg(target):
        return TypeError(f"{kind} is asynchronous: use AsyncOutbox, and await each call")
    if is_sync:
        return TypeError(f"{kind} is not asynchronous: use Outbox")
    return not_a_target(driver)


def decoded(row: str) -> Written:
    """Return a row that READ gave."""
    found = json.loads(row)
    return Written(
        event_type=found["event_type"],
        key=(found["aggregate_type"], found["aggregate_id"]),
        headers=found["headers"] or {},
        message_id=UUID(found["message_id"]),
        exchange=found["exchange"],
        routing_key=found["routing_key"],
        content_type=found["content_type"],
        available_at=_moment(found["available_at"]),
        body=bytes.fromhex(found["hex"]) if found["text"] is None else found["text"],
        state=found["state"],
    )


def _moment(text: str | None) -> datetime | None:
    """Return a moment of the table; one that Python does not have becomes the earliest or the latest that it has."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # infinity, or a year of five digits
        return EARLIEST if text.startswith("-") or text.endswith("BC") else LATEST


def _run_alchemy(target: Any, text: str) -> list[str]:
    import sqlalchemy as sa  # noqa: PLC0415

    if hasattr(target, "flush"):  # a session, which may still hold an OutboxMessage
        target.flush()
    return _column(target.execute(sa.text(text)).all())


def _column(rows: Any) -> list[str]:
    return [value for (value,) in rows]
