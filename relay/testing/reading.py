"""Read the outbox by the connection or session of a test, in its transaction."""

import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Identifier

from relay.outbox.write import driver_of, is_of_asyncpg, not_a_target
from relay.testing.written import Written

if TYPE_CHECKING:
    from relay.outbox.write import Async, Sync

# One text a row: every driver has texts, and JSON's form of a time does not depend on the session's settings.
READ = SQL("""
    SELECT CAST(json_build_object(
        'event_type', event_type, 'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id, 'headers', headers,
        'message_id', message_id, 'exchange', exchange, 'routing_key', routing_key, 'content_type', content_type,
        'available_at', available_at, 'text', CAST(payload AS text), 'hex', encode(payload_bytes, 'hex'), 'state', state
    ) AS text)
    FROM {schema}.message
    ORDER BY id
""")
CLEAR = SQL("DELETE FROM {schema}.message RETURNING event_type")


def statement(text: SQL, schema: str) -> str:
    return text.format(schema=Identifier(schema)).as_string()


def run(target: "Sync", text: str) -> list[str]:
    """Run a statement in the transaction of the target; return the one column of its rows."""
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
    raise not_a_target(driver)


async def run_async(target: "Async", text: str) -> list[str]:
    driver = driver_of(target)
    if isinstance(driver, psycopg.AsyncConnection):
        async with psycopg.AsyncCursor(driver, row_factory=tuple_row) as cursor:
            await cursor.execute(text.encode())
            return _column(await cursor.fetchall())
    if is_of_asyncpg(target):
        return _column(await target.fetch(text))
    if sys.modules.get("sqlalchemy"):
        from sqlalchemy.ext.asyncio import async_scoped_session  # noqa: PLC0415

        from relay.outbox import alchemy  # noqa: PLC0415

        if isinstance(target, alchemy.ASYNC):
            given = target() if isinstance(target, async_scoped_session) else target
            return await given.run_sync(_run_alchemy, text)
    raise not_a_target(target)


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
        available_at=datetime.fromisoformat(found["available_at"]) if found["available_at"] else None,
        body=bytes.fromhex(found["hex"]) if found["text"] is None else found["text"],
        state=found["state"],
    )


def _run_alchemy(target: Any, text: str) -> list[str]:
    import sqlalchemy as sa  # noqa: PLC0415

    if hasattr(target, "flush"):  # a session, which may still hold an OutboxMessage
        target.flush()
    return _column(target.execute(sa.text(text)).all())


def _column(rows: Any) -> list[str]:
    return [value for (value,) in rows]
