"""The inbox: the table of the messages that a consumer has applied, and the statement that writes a batch into it.

It is in the database that the handlers write to. A message is applied if the inbox does not know it and admits it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, LiteralString, get_args
from uuid import UUID

import psycopg
from psycopg import errors
from psycopg.sql import SQL, Composed, Identifier
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Url, settings_of
from relay.consume.apply.fence import FENCED_OUT, Fence
from relay.consume.message import NO_DAY, Delivery
from relay.errors import ConfigurationError, ExpiredMessageError, MisdatedMessageError, PartitionLostError, importing

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
    from sqlalchemy.orm import sessionmaker

Scope = Literal["message", "writer"]  # what identifies a message: its id, or its id and its writer
DEFAULTS = DatabaseSettings()  # for an inbox with SQLAlchemy


@dataclass(frozen=True, slots=True)
class Inbox:
    """The inbox of one consumer, and how its handlers reach the same database.

    Args:
        target: the URL of the database or DatabaseSettings, for handlers that get a connection of psycopg. An engine of
            SQLAlchemy is for handlers that get its connection, a sessionmaker for handlers that get a session. The
            async kinds of both are for `async def`.
        consumer_name: keeps apart several consumers of one message; processes that share a queue share the name.
        schema_name: replaces the schema of the settings, or `outbox` with SQLAlchemy.
        scope: what is applied once. "message": each message id, whichever role wrote it. "writer": each message id of
            each role, and each role has its own keys. All processes of a consumer change it at once, and never back.
    Raises:
        ConfigurationError: the URL does not name PostgreSQL, the engine is not one of postgresql+psycopg, the name is
            empty, or the scope is another word.
    """

    target: "DatabaseSettings | Url | Engine | AsyncEngine | sessionmaker[Any] | async_sessionmaker[Any]"
    consumer_name: str
    schema_name: str | None = None
    scope: Scope = "message"

    def __post_init__(self) -> None:
        if not self.consumer_name:
            raise ConfigurationError("an inbox needs the name of its consumer, which keeps apart several of them")
        if self.scope not in get_args(Scope):
            raise ConfigurationError(f"scope of an inbox is one of {', '.join(get_args(Scope))}; not {self.scope!r}")
        if isinstance(self.target, str | SecretStr):
            object.__setattr__(self, "target", settings_of(DatabaseSettings, self.target))  # it is frozen
        if not isinstance(self.target, DatabaseSettings):
            with importing("sqlalchemy"):
                from relay.consume.apply.sqlalchemy_engine import engine_of  # noqa: PLC0415  # only who uses it pays

            engine_of(self.target)

    @property
    def database(self) -> DatabaseSettings:
        """Return the settings of its database; raises ConfigurationError for an inbox with SQLAlchemy."""
        if not isinstance(self.target, DatabaseSettings):
            raise ConfigurationError("this inbox has an engine of SQLAlchemy, and so no settings")
        return self.target

    @property
    def urls(self) -> tuple[SecretStr, ...]:
        """Return the URL of its database; empty for an inbox with SQLAlchemy."""
        return (self.target.url,) if isinstance(self.target, DatabaseSettings) else ()

    @property
    def schema(self) -> str:
        return self.schema_name or self._settings.schema_name

    @property
    def by_writer(self) -> bool:
        """Whether messages of two writers with the same id are two messages."""
        return self.scope == "writer"

    @property
    def statement_timeout(self) -> float:
        """Return the seconds that a statement of the consumer may take."""
        return self._settings.command_timeout

    def require_connections(self, count: int) -> None:
        """Check that `count` connections can be open at once; raises ConfigurationError when a pool has fewer."""
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
        """Return the statement with the schema, and with values that the driver does not pass as parameters."""
        return SQL(text).format(schema=Identifier(self.schema), **values)


# Returns the messages that were not known and must be applied (true), and those that are not admitted (false).
# - Both come from one snapshot. With two, a message that is no longer admitted at the second look would be taken for a
#   known one.
# - The INSERT goes in the order of message_id: two consumers that got the same messages wait for each other, and cannot
#   deadlock.
# - The setting marks the transaction, and ends with it: see `mark_of`. It only affects transactions that begin later.
# - The arrays come from a SELECT. If the server saw how many rows they have, it would plan again each time. That costs
#   more than all the rest (0.3 ms of CPU where keys may be held).
REMEMBER: LiteralString = """
    WITH {fence} {beginning} arrived AS (
        SELECT message_id, message_day, business_key, {admitted} AS is_admitted, {was_applied} AS was_applied
        FROM unnest(
            (SELECT %(message_ids)s::uuid[]), (SELECT %(days)s::date[]), (SELECT %(business_keys)s::text[]),
            (SELECT %(keys)s::text[]), (SELECT %(plain_ids)s::uuid[])
        ) AS arrived (message_id, message_day, business_key, key, plain_id)
    ), remembered AS (
        INSERT INTO {schema}.processed_message (consumer_name, message_id, message_day, business_key)
        SELECT %(consumer)s, message_id, message_day, business_key FROM arrived
        WHERE is_admitted AND NOT was_applied
        ORDER BY message_id
        ON CONFLICT (consumer_name, message_id, message_day) DO NOTHING
        RETURNING message_id
    )
    SELECT message_id, true FROM remembered
    WHERE (SELECT set_config('default_transaction_read_only', 'on', true)) = 'on'
    UNION ALL
    SELECT message_id, false FROM arrived WHERE NOT is_admitted
    {fenced_out}
"""


# The value of `relay.outbox.identity.id_of_writer` for a row of the outbox.
ID_OF_WRITER: LiteralString = """
    encode(substring(sha256(uuid_send(message_id) || convert_to(written_as, 'UTF8')) FOR 16), 'hex')::uuid
"""

# With scope="writer", the inbox still knows some messages by message_id alone: messages without a writer, and messages
# that it applied before it had this scope. The server finds the row by an index (tests/consume/test_plans.py).
WAS_APPLIED: LiteralString = """
    (
        SELECT true FROM {schema}.processed_message AS before
        WHERE before.consumer_name = %(consumer)s AND before.message_id = arrived.plain_id
            AND before.message_day = arrived.message_day
        LIMIT 1
    ) IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Admission:
    """Which messages are admitted, in SQL: common table expressions, and a condition on `arrived`.

    With a fence, no row is admitted once another member holds the partition.
    """

    beginning: LiteralString = ""
    where: LiteralString = "true"
    fence: Fence | None = None

    def statement(self, inbox: Inbox) -> Composed:
        return SQL(REMEMBER).format(
            schema=Identifier(inbox.schema),
            fence=SQL("") if self.fence is None else self.fence.held(inbox.schema, inbox.consumer_name),
            fenced_out=SQL("" if self.fence is None else FENCED_OUT),
            beginning=inbox.statement(self.beginning),
            admitted=inbox.statement(self.where),
            was_applied=inbox.statement(WAS_APPLIED if inbox.by_writer else "false"),
        )


EVERYTHING = Admission()


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of a batch: `count` messages were applied, the ids in `left` were not admitted, the rest was known."""

    count: int
    left: frozenset[UUID]


def mark_of(connection: psycopg.Connection | psycopg.AsyncConnection) -> str | None:
    """Return the setting by which `REMEMBER` has marked its transaction.

    The server reports each change with the answer to the statement that made it, so this sends no query. Behind a proxy
    that does not pass these reports on, the value never changes.
    """
    return connection.info.parameter_status("default_transaction_read_only")


def require_fence(remembered: Iterable[tuple[Any, ...]]) -> None:
    """Raise PartitionLostError if the rows of `REMEMBER` show that this member is no longer within the fence."""
    if any(message_id is None for message_id, _ in remembered):
        raise PartitionLostError


def applied_of(remembered: Sequence[tuple[UUID, bool]]) -> Applied:
    """Return the result of a batch from the rows of `REMEMBER`."""
    left = frozenset(message_id for message_id, is_admitted in remembered if not is_admitted)
    return Applied(len(remembered) - len(left), left)


MAKE_DAYS = "SELECT {schema}.ensure_inbox_days(day, 1) FROM unnest(%(days)s::date[]) AS day"

LAST_DAY = "inbox_last_day"  # the name that ensure_inbox_days gives to its bound (migrations/versions/0011_rights.py)


def lacks_day(error: errors.CheckViolation, schema: str) -> bool:
    """Whether the error means that the INSERT into the inbox found no partition, not a constraint of another table."""
    diag = error.diag
    return (diag.schema_name, diag.table_name, diag.constraint_name) == (schema, "processed_message", None)


def days_of(batch: Sequence[Delivery]) -> list[date]:
    """Return the days of a batch: their partitions may not exist yet."""
    return sorted({delivery.message.day for delivery in batch} - {NO_DAY})


@contextmanager
def refused_day_named(batch: Sequence[Delivery]) -> Iterator[None]:
    """Turn the server's refusal of a day into an error that names the message of that day.

    Raises:
        ExpiredMessageError: the inbox has forgotten the day, so it cannot know whether the message was applied before.
        MisdatedMessageError: the day is further ahead than clocks differ.
    """
    try:
        yield
    except errors.ObjectNotInPrerequisiteState as error:
        bound = date.fromisoformat(error.diag.message_detail or "")
        if error.diag.constraint_name == LAST_DAY:
            message = next(each.message for each in batch if each.message.day > bound)
            raise MisdatedMessageError(message.type, message.message_id, message.day, bound) from None
        message = next(each.message for each in batch if NO_DAY < each.message.day < bound)
        raise ExpiredMessageError(message.type, message.message_id, message.day, bound) from None
