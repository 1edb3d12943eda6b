"""The SQLAlchemy engine that an application has given to an inbox."""

import os
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Engine, Pool
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import QueuePool

from relay.errors import ConfigurationError, ForkedError

UNLIMITED = -1  # `max_overflow` of a pool

ENGINES: WeakSet[Engine] = WeakSet()  # of the inboxes of this process
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
