"""What consumers have applied, as their inbox has it; it may be in a separate database."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import NamedTuple

from psycopg import errors
from psycopg.rows import TupleRow
from psycopg.sql import SQL, Composed, Literal

from relay.config.settings import DatabaseSettings
from relay.errors import ConfigurationError, DatabaseUnavailableError, InboxUnavailableError
from relay.operate.reconcile.interval import Interval
from relay.operate.reconcile.report import RepeatedKey
from relay.operate.reconcile.table import listed
from relay.operate.session import in_words, limit_statements
from relay.operate.status import BY_INDEX
from relay.servers.postgres.bounded_values import bound_values
from relay.servers.postgres.database import connect
from relay.servers.postgres.tables import Tables

OWN, FLAG = "database.url", "--inbox"  # where the URL of the inbox is


class AppliedMessage(NamedTuple):
    """A message that a consumer has applied."""

    message_id: str
    consumer: str
    processed_at: datetime


class Handled(NamedTuple):
    """What a consumer has noted of itself; nothing: every type is expected of it."""

    event_types: list[str] | None
    queues: list[str]


NOTHING_NOTED = Handled(None, [])

# Of a consumer of several queues all their types.
NOTED = SQL("""
    SELECT consumer_name,
        CASE WHEN bool_and(event_types IS NOT NULL) THEN (
            SELECT array_agg(DISTINCT event_type ORDER BY event_type)
            FROM {schema}.consumer_queue AS own CROSS JOIN unnest(own.event_types) AS event_type
            WHERE own.consumer_name = noted.consumer_name
        ) END,
        array_agg(queue ORDER BY queue)
    FROM {schema}.consumer_queue AS noted
    GROUP BY consumer_name
""")

# From one name to the next through the primary key: DISTINCT would read the whole inbox.
CONSUMERS = SQL("""
    WITH RECURSIVE known (name) AS (
        (SELECT consumer_name FROM {schema}.processed_message ORDER BY consumer_name LIMIT 1)
        UNION ALL
        SELECT following.consumer_name
        FROM known CROSS JOIN LATERAL (
            SELECT consumer_name FROM {schema}.processed_message
            WHERE consumer_name > known.name ORDER BY consumer_name LIMIT 1
        ) AS following
    )
    SELECT name FROM known
""")

ENTRIES = SQL("""
    SELECT message_id::text, consumer_name, processed_at
    FROM {schema}.processed_message
    WHERE processed_at >= {first}::timestamptz AND processed_at < {end}::timestamptz
        AND consumer_name = ANY ({consumers}::text[])
    ORDER BY processed_message.message_id
""")

# LIMIT keeps it a look into the primary key for each.
APPLIED = SQL("""
    SELECT asked.consumer_name, asked.message_id::text
    FROM unnest(%(consumers)s::text[], %(message_ids)s::uuid[]) AS asked (consumer_name, message_id)
    CROSS JOIN LATERAL (
        SELECT FROM {schema}.processed_message AS entry
        WHERE entry.consumer_name = asked.consumer_name AND entry.message_id = asked.message_id
        LIMIT 1
    ) AS found
""")

REPEATED_KEYS = SQL("""
    SELECT consumer_name, business_key, count(*), count(*) OVER () AS keys
    FROM {schema}.processed_message
    WHERE processed_at >= %(since)s AND processed_at < %(until)s
        AND consumer_name = ANY (%(consumers)s) AND business_key IS NOT NULL
    GROUP BY consumer_name, business_key
    HAVING count(*) > 1
    ORDER BY consumer_name, business_key
    LIMIT %(limit)s
""")


class InboxReader:
    """A session in the database of an inbox."""

    def __init__(self, tables: Tables, timeout: float, url: str) -> None:
        self._tables = tables
        self._timeout = timeout
        self._url = url

    @classmethod
    @contextmanager
    def open(cls, database: DatabaseSettings, *, timeout: float, url: str) -> Iterator["InboxReader"]:
        """Connect.

        Args:
            timeout: seconds for each statement.
            url: what the operator calls its URL; database.url when it is that of the outbox.
        Raises:
            InboxUnavailableError: another URL than database.url lets us not in, or the connection was lost.
            ConfigurationError: a pooler that keeps no session.
            SchemaError, AccessError, DeadlineError: as `relay.operate.session.session`.
        """
        with of_inbox(url):
            connection = connect(database)
        try:
            inbox = cls(Tables(connection, database.schema_name), timeout, url)
            with inbox._words():
                limit_statements(connection, timeout)
                bound_values(connection)
            yield inbox
        finally:
            connection.close()

    def consumers(self) -> list[str]:
        """Return the names of all that have ever applied a message."""
        with self._words(), self._tables.transaction():
            self._tables.connection.execute(BY_INDEX)
            return [name for (name,) in self._tables.execute(CONSUMERS)]

    def handled(self, consumers: Sequence[str]) -> dict[str, Handled]:
        """Return what these consumers have noted of themselves; nothing where this login may not read it."""
        with self._words():
            try:
                rows = self._tables.execute(NOTED).fetchall()
            except (errors.UndefinedTable, errors.InsufficientPrivilege):  # tables or grants of an earlier release
                rows = []
        noted = {name: Handled(event_types, queues) for name, event_types, queues in rows}
        return {name: noted.get(name, NOTHING_NOTED) for name in consumers}

    @contextmanager
    def list_entries(self, interval: Interval, consumers: Sequence[str]) -> Iterator[Iterator[AppliedMessage]]:
        """Sort in the database what was applied in the interval, and give it in the order of message_id."""
        statement = self.entries_statement(interval, consumers)
        with ExitStack() as stack:
            with self._words():  # not around what the caller does meanwhile
                entries = stack.enter_context(listed(self._tables.connection, "inbox_rows", statement))
            yield self._read(entries)

    def entries_statement(self, interval: Interval, consumers: Sequence[str]) -> Composed:
        return self._tables.sql(
            ENTRIES,
            first=Literal(interval.first_read.isoformat()),
            end=Literal(interval.end_read.isoformat()),
            consumers=Literal(list(consumers)),
        )

    def applied(self, asked: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return which of these (consumer, message id) have been applied at any time."""
        values = {"consumers": [name for name, _ in asked], "message_ids": [message_id for _, message_id in asked]}
        with self._words(), self._tables.transaction():
            self._tables.connection.execute(BY_INDEX)
            return set(self._tables.execute(APPLIED, values))

    def repeated_keys(self, interval: Interval, consumers: Sequence[str], limit: int) -> tuple[int, list[RepeatedKey]]:
        """Count the business keys of several messages applied in the interval, and give the first of them."""
        values = {
            "since": interval.since,
            "until": interval.until,
            "consumers": list(consumers),
            "limit": limit,
        }
        with self._words():
            rows = self._tables.execute(REPEATED_KEYS, values).fetchall()
        return rows[0][-1] if rows else 0, [RepeatedKey(*row[:-1]) for row in rows]

    def _read(self, entries: Iterator[TupleRow]) -> Iterator[AppliedMessage]:
        with self._words():
            yield from map(AppliedMessage._make, entries)

    @contextmanager
    def _words(self) -> Iterator[None]:
        connection, schema = self._tables.connection, self._tables.schema
        words = in_words(connection, schema, self._timeout, lack="table processed_message", url=self._url)
        with of_inbox(self._url), words:
            yield


@contextmanager
def of_inbox(url: str) -> Iterator[None]:
    """Let errors that name database.url name this URL in its place, where the inbox is in a separate database."""
    try:
        yield
    except DatabaseUnavailableError as error:
        if url == OWN:
            raise
        raise InboxUnavailableError(f"{url}: {error}") from error
    except ConfigurationError as error:
        if url == OWN:
            raise
        raise ConfigurationError(str(error).replace("database.url (RELAY_DATABASE_URL)", url)) from error
