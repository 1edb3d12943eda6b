"""The SQLAlchemy engine that an application has given to an inbox."""

import os
from weakref import WeakKeyDictionary, WeakSet

import psycopg
from sqlalchemy import Engine, Pool
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import QueuePool

from relay.errors import ConfigurationError, ForkedError
from relay.servers.postgres.pooler import LENT_OUT, NAME_SERVER, Lends

UNLIMITED = -1  # `max_overflow` of a pool

ENGINES: WeakSet[Engine] = WeakSet()  # of the inboxes of this process
KEEPERS: WeakSet[Engine] = WeakSet()  # those behind a pooler that keeps a session for each client
INHERITED: WeakKeyDictionary[Pool, int] = WeakKeyDictionary()  # pools with connections of the parent, and its id


def engine_of(target: object) -> Engine | AsyncEngine:
    """Return the engine of an inbox's target: the engine itself, or the one that its sessionmaker is bound to.

    Raises:
        ConfigurationError: the target has no single engine, or the engine is of another database or driver.
    """
    engine = target
    if isinstance(target, sessionmaker | async_sessionmaker):
        engine = target.kw.get("bind")
        if target.kw.get("binds") or engine is None:
            raise ConfigurationError("the sessions of an inbox are bound to one engine, that of the inbox rows")
    if not isinstance(engine, Engine | AsyncEngine):
        raise ConfigurationError(
            "an inbox is made with a URL or DatabaseSettings, or with an engine or sessionmaker of SQLAlchemy;"
            f" not with {type(engine).__name__}"
        )
    if (engine.dialect.name, engine.dialect.driver) != ("postgresql", "psycopg"):
        raise ConfigurationError(
            f"the engine of an inbox is one of postgresql+psycopg, not of {engine.dialect.name}+{engine.dialect.driver}"
        )
    ENGINES.add(engine.sync_engine if isinstance(engine, AsyncEngine) else engine)
    return engine


def may_lose_statements(engine: Engine, connection: psycopg.Connection | psycopg.AsyncConnection, backend: int) -> bool:
    """Whether a connection prepares statements, and goes through a pooler that is not known to keep sessions.

    Args:
        backend: the server process that has run a statement of it.
    """
    is_pooled = backend != connection.info.backend_pid
    return is_pooled and connection.prepare_threshold is not None and engine not in KEEPERS


def note_lending(engine: Engine, when: Lends) -> None:
    """Note that a pooler keeps the sessions of an engine; raises ConfigurationError if it lends them out."""
    if when is not Lends.NEVER:
        raise ConfigurationError(
            f"the engine of the inbox {LENT_OUT}: {NAME_SERVER}, or make the engine with"
            ' connect_args={"prepare_threshold": None}'
        )
    KEEPERS.add(engine)


def refuse_inherited(pool: Pool) -> None:
    """Raise ForkedError if the pool has connections that the parent process has opened."""
    if (parent := INHERITED.get(pool)) is not None:
        remedy = "call its dispose(close=False) in each process, after the fork"
        raise ForkedError("the pool of the inbox's engine", parent, remedy)


def _note_inherited() -> None:
    for engine in ENGINES:
        pool = engine.pool
        if isinstance(pool, QueuePool) and pool.checkedin() + pool.checkedout():
            INHERITED[pool] = os.getppid()


os.register_at_fork(after_in_child=_note_inherited)


def require_connections(target: object, count: int) -> None:
    """Check that the engine of an inbox may open `count` connections at once.

    Raises:
        ConfigurationError: its pool has fewer. The task that asks for one more would wait without end.
    """
    pool = engine_of(target).pool
    if not isinstance(pool, QueuePool) or pool._max_overflow == UNLIMITED:
        return
    if (most := pool.size() + pool._max_overflow) < count:
        raise ConfigurationError(
            f"the engine's pool has {most} connections at most and this consumer needs {count}: create the engine with"
            f" pool_size={count}"
        )
