"""Where a consumer remembers what it has applied: in the database that its handlers write to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString

from psycopg.sql import SQL, Composed, Identifier
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Url, settings_of
from relay.errors import ConfigurationError, importing

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
    from sqlalchemy.orm import sessionmaker

DEFAULTS = DatabaseSettings()  # of an inbox with SQLAlchemy


@dataclass(frozen=True, slots=True)
class Inbox:
    """The inbox of one consumer, and by which way its handlers work in the same database.

    Args:
        target: the URL of the database or DatabaseSettings, for handlers that get a connection of psycopg; an engine of
            SQLAlchemy for those that get its connection, a sessionmaker for those that get a session. Their async
            kinds are for `async def`.
        consumer_name: keeps apart several consumers of one message; processes that share a queue share the name.
        schema_name: in place of that of the settings, or of `outbox`.
    Raises:
        ConfigurationError: the URL is none of PostgreSQL, or the engine none of postgresql+psycopg.
    """

    target: "DatabaseSettings | Url | Engine | AsyncEngine | sessionmaker[Any] | async_sessionmaker[Any]"
    consumer_name: str
    schema_name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.target, str | SecretStr):
            object.__setattr__(self, "target", settings_of(DatabaseSettings, self.target))  # it is frozen
        if not isinstance(self.target, DatabaseSettings):
            with importing("sqlalchemy"):
                from relay.consume.apply.sqlalchemy_engine import engine_of  # noqa: PLC0415  # only who uses it pays

            engine_of(self.target)

    @property
    def database(self) -> DatabaseSettings:
        """Where it is; raises ConfigurationError where SQLAlchemy knows that."""
        if not isinstance(self.target, DatabaseSettings):
            raise ConfigurationError("this inbox has an engine of SQLAlchemy, and no settings of its own")
        return self.target

    @property
    def urls(self) -> tuple[SecretStr, ...]:
        """Return the URL of its database; none where SQLAlchemy knows it."""
        return (self.target.url,) if isinstance(self.target, DatabaseSettings) else ()

    @property
    def schema(self) -> str:
        return self.schema_name or self._settings.schema_name

    @property
    def statement_timeout(self) -> float:
        """Seconds that a statement of ours may take."""
        return self._settings.command_timeout

    def require_connections(self, count: int) -> None:
        """Check that so many connections can be open at once; raises ConfigurationError where a pool has fewer."""
        if not isinstance(self.target, DatabaseSettings):
            from relay.consume.apply.sqlalchemy_engine import require_connections  # noqa: PLC0415  # as above

            require_connections(self.target, count)

    @property
    def _settings(self) -> DatabaseSettings:
        return self.target if isinstance(self.target, DatabaseSettings) else DEFAULTS

    @property
    def connection_options(self) -> dict[str, Any]:
        return {"application_name": f"outbox-consumer {self.consumer_name}"}

    def statement(self, text: LiteralString, **values: Any) -> Composed:
        """Fill in the schema, and values that are none of the statement's parameters."""
        return SQL(text).format(schema=Identifier(self.schema), **values)
