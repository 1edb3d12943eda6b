"""Write events in the caller's transaction."""

import sys
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, overload

import psycopg

from relay.outbox import insert, watch
from relay.outbox.awaited import Awaited
from relay.outbox.declared import Declared
from relay.outbox.events import Event
from relay.outbox.row import MAX_PAYLOAD_BYTES, NewRow, row_of
from relay.outbox.trace import current_trace_context


class DjangoConnection(Protocol):
    """The part of `django.db.connection` that is used here, without an import of Django."""

    @property
    def connection(self) -> Any: ...
    @property
    def atomic_blocks(self) -> Sequence[Any]: ...
    @property
    def execute_wrappers(self) -> Sequence[Any]: ...
    @property
    def wrap_database_errors(self) -> Any: ...
    def ensure_connection(self) -> None: ...
    def validate_no_broken_transaction(self) -> None: ...
    def cursor(self) -> Any: ...


class DjangoCursor(Protocol):
    """The part of Django's cursor that is used here."""

    @property
    def db(self) -> Any: ...


class AsyncpgConnection(Protocol):
    """The part of asyncpg's connections that is used here."""

    def is_in_transaction(self) -> bool: ...
    async def execute(self, query: str, *args: Any) -> Any: ...
    async def fetch(self, query: str, *args: Any) -> Any: ...


# SQLAlchemy costs 0.2 s to import. So it is imported only in an application that has imported it already.
if TYPE_CHECKING:
    from relay.outbox import alchemy

    Sync = psycopg.Connection[Any] | psycopg.Cursor[Any] | alchemy.Sync | DjangoConnection | DjangoCursor
    Async = psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any] | alchemy.Async | AsyncpgConnection

# From this many rows, `add_many` uses COPY. At 100 rows COPY takes 12 us a row and one INSERT 22; at 5 they are equal.
ROWS_TO_COPY = 50
HINTS = {
    "relay.outbox.events.Event": ": the connection comes first, as in add(connection, event)",
    "psycopg_pool.": ": pass the connection of pool.connection()",
    "sqlalchemy.": ": pass the connection of engine.begin() or the session of a sessionmaker",
    "asyncpg.": ": pass the connection of pool.acquire()",
    "sqlite3.": ": the outbox is in PostgreSQL",
}
CALLS = 2  # frames from the application to the start of the write: `add` or `add_many`, and `_write`


@overload
def add(
    target: "Sync",
    *events: Event | Declared | Sequence[Event | Declared],
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> None: ...
@overload
def add(
    target: "Async",
    *events: Event | Declared | Sequence[Event | Declared],
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> Coroutine[Any, Any, None]: ...
def add(
    target: "Sync | Async",
    *events: Event | Declared | Sequence[Event | Declared],
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> Coroutine[Any, Any, None] | None:
    """Write the events in the transaction of `target`. With an asynchronous `target`, the application must await it.

    `target`: a connection or cursor of psycopg 3 or of Django with it, a connection or session of SQLAlchemy, or a
    connection of asyncpg. This function neither opens, commits nor rolls back: the events exist if and when the
    caller's transaction commits.

    `events`: one by one, or in lists; also instances of classes that `event` declares.

    `autocommit`: the target may be in autocommit mode and outside a transaction. Then the events are committed at once,
    even if the change that they report fails.

    The events carry the current OpenTelemetry span as their trace context.

    Raises:
        EventError: the outbox would refuse an event; nothing was sent to the database, the transaction goes on.
        NoTransactionError: the target is in autocommit mode, outside a transaction; nothing was sent.
        NotAwaitedError: the application did not await it, and nothing was written. No `except` sees it: Python prints
            it to stderr. In a handler it fails the message.
    """
    rows = _rows(_one_by_one(events), max_payload_bytes)
    return _write(target, rows, schema, by_copy=False, autocommit=autocommit)


@overload
def add_many(
    target: "Sync",
    events: Iterable[Event | Declared],
    *,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> None: ...
@overload
def add_many(
    target: "Async",
    events: Iterable[Event | Declared],
    *,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> Coroutine[Any, Any, None]: ...
def add_many(
    target: "Sync | Async",
    events: Iterable[Event | Declared],
    *,
    schema: str = "outbox",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    autocommit: bool = False,
) -> Coroutine[Any, Any, None] | None:
    """Write any number of events as `add` does, and many of them by COPY.

    All rows are in memory before the first is sent, so that a bad event leaves the transaction usable. For millions of
    events, use several calls in one transaction. With another driver than psycopg 3 under SQLAlchemy, and in psycopg's
    pipeline mode, the rows are written by INSERT. COPY raises psycopg's errors, also under SQLAlchemy.
    """
    if isinstance(events, Event):
        raise TypeError("add_many takes many events, as in add_many(connection, events); one is written by add")
    rows = _rows(events, max_payload_bytes)
    return _write(target, rows, schema, by_copy=len(rows) >= ROWS_TO_COPY, autocommit=autocommit)


def _one_by_one(given: Iterable[Event | Declared | Sequence[Event | Declared]]) -> Iterator[Event | Declared]:
    for each in given:
        if isinstance(each, list | tuple):
            yield from each
        else:
            yield each  # type: ignore[misc]  # or what is refused


def _rows(events: Iterable[Event | Declared], max_payload_bytes: int) -> list[NewRow]:
    trace_context = current_trace_context()
    rows = [row_of(event, trace_context, max_payload_bytes) for event in events]
    watch.note(rows)
    return rows


def _write(
    target: "Sync | Async", rows: list[NewRow], schema: str, *, by_copy: bool, autocommit: bool
) -> Coroutine[Any, Any, None] | None:
    autocommit = autocommit and not watch.is_strict()
    django = django_of(target)
    driver = driver_of(django or target)
    if isinstance(driver, psycopg.AsyncConnection):
        return Awaited(insert.write_async(driver, rows, schema, by_copy=by_copy, autocommit=autocommit), CALLS)
    if isinstance(driver, psycopg.Connection):
        if django is None:
            insert.write(driver, rows, schema, by_copy=by_copy, autocommit=autocommit)
        else:
            from relay.outbox import by_django  # noqa: PLC0415

            by_django.write(django, rows, schema, by_copy=by_copy, autocommit=autocommit)
        return None
    if is_of_asyncpg(target):
        from relay.outbox import by_asyncpg  # noqa: PLC0415

        return Awaited(by_asyncpg.write(target, rows, schema, autocommit=autocommit), CALLS)
    if sys.modules.get("sqlalchemy"):  # if it is not imported, the target cannot be an object of it
        from relay.outbox import alchemy  # noqa: PLC0415

        if isinstance(target, alchemy.SYNC):
            alchemy.write(target, rows, schema, by_copy=by_copy, autocommit=autocommit)
            return None
        if isinstance(target, alchemy.ASYNC):
            return Awaited(alchemy.write_async(target, rows, schema, by_copy=by_copy, autocommit=autocommit), CALLS)
    raise not_a_target(driver)


def not_a_target(given: object) -> TypeError:
    """Return the error for what is no connection or session."""
    kind = f"{type(given).__module__}.{type(given).__qualname__}"
    hint = next((hint for each, hint in HINTS.items() if kind.startswith(each)), "")
    return TypeError(f"{kind} is no connection or session of psycopg 3, SQLAlchemy, asyncpg or Django{hint}")


def is_of_asyncpg(target: object) -> TypeGuard[AsyncpgConnection]:
    """Whether it is a connection of asyncpg, maybe of its pool."""
    asyncpg = sys.modules.get("asyncpg")
    return asyncpg is not None and isinstance(target, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy)


def driver_of(target: object) -> object:
    """Return psycopg's connection of its cursor, or of a connection or cursor of Django; else the target."""
    if isinstance(target, psycopg.Cursor | psycopg.AsyncCursor):
        return target.connection
    if (django := django_of(target)) is None:
        return target
    if django.connection is None:  # Django opens it at the first statement, which may be this one
        django.ensure_connection()
    return django.connection


def django_of(target: object) -> DjangoConnection | None:
    """Return the connection of Django that the target is, or whose cursor it is."""
    validates = getattr(target, "validate_no_broken_transaction", None) or getattr(
        getattr(target, "db", None), "validate_no_broken_transaction", None
    )
    # The proxy `django.db.connection` looks for the connection at each attribute. A method of it knows the connection.
    # This one is not patched, as pytest-django does with `ensure_connection` to forbid the database.
    return getattr(validates, "__self__", None)
