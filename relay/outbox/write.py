"""Write events in the caller's transaction."""

import sys
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Protocol, overload

import psycopg

from relay.outbox import insert
from relay.outbox.awaited import Awaited
from relay.outbox.event import Event
from relay.outbox.row import MAX_PAYLOAD_BYTES, Row, row_of
from relay.outbox.trace import current_trace_context


class DjangoConnection(Protocol):
    """What `django.db.connection` is, without importing Django."""

    @property
    def connection(self) -> Any: ...
    def ensure_connection(self) -> None: ...


class DjangoCursor(Protocol):
    """What `django.db.connection.cursor()` returns."""

    @property
    def db(self) -> Any: ...


# SQLAlchemy costs 0.2 s to import: only an application that uses it pays, and has paid already.
if TYPE_CHECKING:
    from relay.outbox import alchemy

    Sync = psycopg.Connection[Any] | alchemy.Sync | DjangoConnection | DjangoCursor
    Async = psycopg.AsyncConnection[Any] | alchemy.Async

# Rows from which `add_many` copies: at 100 rows COPY takes 12 us a row and one INSERT 22, at 5 they are even.
ROWS_TO_COPY = 50
HINTS = {
    "relay.outbox.event.Event": ": the connection comes first, as in add(connection, event)",
    "psycopg.": ": of a cursor pass cursor.connection, of a pool pool.connection()",
    "psycopg_pool.": ": pass what pool.connection() gives",
    "sqlalchemy.": ": pass what engine.begin() or a sessionmaker gives",
    "asyncpg.": ": asyncpg is taken beneath SQLAlchemy only",
}
CALLS = 2  # from the application to where the write begins: `add` or `add_many`, and `_write`


@overload
def add(
    target: "Sync",
    *events: Event,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> None: ...
@overload
def add(
    target: "Async",
    *events: Event,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> Coroutine[Any, Any, None]: ...
def add(
    target: "Sync | Async",
    *events: Event,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> Coroutine[Any, Any, None] | None:
    """Write the events in the transaction of `target`; await it where `target` is asynchronous.

    `target`: a connection of psycopg, a connection or session of SQLAlchemy, or a connection or cursor of Django (with
    psycopg 3). It is neither opened, nor committed, nor rolled back: the events exist if and when the caller's
    transaction commits.

    `autocommit`: the target may be in autocommit mode and outside of a transaction. Then the events are committed at
    once, whatever becomes of the change that they tell of.

    The current OpenTelemetry span goes along as the events' trace context.

    Raises:
        EventError: an event cannot be carried; nothing was sent to the database, the transaction goes on.
        NoTransactionError: the target is in autocommit mode, outside of a transaction; nothing was sent.
        NotAwaitedError: nobody awaited it, and nothing was written. No `except` sees it: Python prints it to stderr.
    """
    rows = _rows(events, max_payload_bytes)
    return _write(target, rows, schema, by_copy=False, autocommit=autocommit)


@overload
def add_many(
    target: "Sync",
    events: Iterable[Event],
    *,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> None: ...
@overload
def add_many(
    target: "Async",
    events: Iterable[Event],
    *,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> Coroutine[Any, Any, None]: ...
def add_many(
    target: "Sync | Async",
    events: Iterable[Event],
    *,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> Coroutine[Any, Any, None] | None:
    """Write any number of events as `add` does; where they are many and psycopg 3 can, by COPY.

    All rows are in memory before the first is sent, so that a bad event leaves the transaction usable. Give millions in
    several calls, in one transaction. With another driver beneath SQLAlchemy, and in psycopg's pipeline mode, the rows
    are written by INSERT. The errors of COPY are psycopg's own, also beneath SQLAlchemy.
    """
    if isinstance(events, Event):
        raise TypeError("add_many takes many events, as in add_many(connection, events); one is written by add")
    rows = _rows(events, max_payload_bytes)
    return _write(target, rows, schema, by_copy=len(rows) >= ROWS_TO_COPY, autocommit=autocommit)


def _rows(events: Iterable[Event], max_payload_bytes: int) -> list[Row]:
    trace_context = current_trace_context()
    return [row_of(event, trace_context, max_payload_bytes) for event in events]


def _write(
    target: "Sync | Async", rows: list[Row], schema: str, *, by_copy: bool, autocommit: bool
) -> Coroutine[Any, Any, None] | None:
    driver = _beneath_django(target)
    if isinstance(driver, psycopg.AsyncConnection):
        return Awaited(insert.write_async(driver, rows, schema, by_copy=by_copy, autocommit=autocommit), CALLS)
    if isinstance(driver, psycopg.Connection):
        insert.write(driver, rows, schema, by_copy=by_copy, autocommit=autocommit)
        return None
    if sys.modules.get("sqlalchemy"):  # else it is not imported, and nothing of it can be the target
        from relay.outbox import alchemy  # noqa: PLC0415

        if isinstance(target, alchemy.ASYNC):
            return Awaited(alchemy.write_async(target, rows, schema, by_copy=by_copy, autocommit=autocommit), CALLS)
        if isinstance(target, alchemy.SYNC):
            alchemy.write(target, rows, schema, by_copy=by_copy, autocommit=autocommit)
            return None
    kind = f"{type(driver).__module__}.{type(driver).__qualname__}"
    hint = next((hint for each, hint in HINTS.items() if kind.startswith(each)), "")
    raise TypeError(f"{kind} is no connection or session of psycopg 3, SQLAlchemy or Django{hint}")


def _beneath_django(target: object) -> object:
    """Return the driver's connection of a connection or cursor of Django; everything else as it is."""
    connection: Any = getattr(target, "db", target)
    if not hasattr(connection, "ensure_connection"):
        return target
    connection.ensure_connection()  # Django opens it at the first statement, which this may be
    return connection.connection
