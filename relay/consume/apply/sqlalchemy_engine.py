"""The engine of SQLAlchemy with which an application made an inbox."""

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import QueuePool

from relay.errors import ConfigurationError

UNLIMITED = -1  # `max_overflow` of a pool


def engine_of(target: object) -> Engine | AsyncEngine:
    """Return the engine of what an inbox was made with.

    Raises:
        ConfigurationError: it has no URL, or one of another database or driver.
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
    return engine


def require_connections(target: object, count: int) -> None:
    """Check that the engine of an inbox may open so many connections at once.

    Raises:
        ConfigurationError: its pool has fewer, and the task that asks for the last would wait without end.
    """
    pool = engine_of(target).pool
    if not isinstance(pool, QueuePool) or pool._max_overflow == UNLIMITED:
        return
    if (most := pool.size() + pool._max_overflow) < count:
        raise ConfigurationError(
            f"the engine's pool has {most} connections at most and this consumer needs {count}: create the engine with"
            f" pool_size={count}"
        )
