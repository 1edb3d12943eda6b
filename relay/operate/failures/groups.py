"""Failures by their cause: parked rows, quarantined routes and held messages in the tables, dead letters in a queue.

A million parked rows are grouped by a narrow table that a trigger fills (migrations/versions/0015_jobs.py). The words
of a group are read from its first row.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

import psycopg
from psycopg.rows import class_row
from psycopg.sql import SQL, Composed, Identifier

from relay.config.settings import BrokerSettings
from relay.errors import NotFoundError
from relay.operate.dead_letters.letter import Letter, Selection
from relay.operate.dead_letters.read import read_letters
from relay.operate.failures.cause import FailureKind, failure_id

MOST_GROUPS = 1000  # of one kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What failed for one cause.

    Attributes:
        place: the exchange, or the consumer of held messages.
        keys_held: keys whose later messages wait for one of the group.
        rows_held: those messages.
        retried: how often an operator, or for a route the relay, tried the group's messages before.
        example: the id of the first row or route, or the message id of the first letter.
    """

    id: str
    kind: FailureKind
    cause: str
    event_type: str | None
    place: str | None
    count: int
    first_at: datetime | None
    last_at: datetime | None
    keys_held: int = 0
    rows_held: int = 0
    retried: int = 0
    example: str | None = None


@dataclass(slots=True)
class _Counts:
    """A row of a statement below."""

    failure: str | None
    cause: str | None
    event_type: str | None
    place: str | None
    count: int
    first_at: datetime | None
    last_at: datetime | None
    keys_held: int
    rows_held: int
    retried: int
    example: str | None


# Held rows are counted by the row that they wait behind, and few rows have any behind them. LIMIT 1 keeps PostgreSQL
# from reading all parked rows for a few examples (tests/failures/test_groups.py).
PARKED_GROUPS = SQL("""
    WITH held AS MATERIALIZED (
        SELECT held_behind AS id, count(*) AS rows
        FROM {schema}.message_state WHERE state = 'parked' AND held_behind IS NOT NULL
        GROUP BY held_behind
    ), behind AS (
        SELECT failure, count(*) AS keys, sum(held.rows) AS rows
        FROM held JOIN {schema}.parked_failure USING (id) GROUP BY failure
    ), found AS (
        SELECT failure, count(*) AS count, min(parked_at) AS first_at, max(parked_at) AS last_at,
            sum(retried) AS retried, min(id) AS example
        FROM {schema}.parked_failure
        WHERE %(failure)s::text IS NULL OR failure = %(failure)s
        GROUP BY failure
        ORDER BY count DESC, failure
        LIMIT %(limit)s
    )
    SELECT found.failure, {schema}.cause(row.last_error) AS cause, row.event_type, row.exchange AS place, found.count,
        first_at, last_at, coalesce(behind.keys, 0) AS keys_held, coalesce(behind.rows, 0)::bigint AS rows_held,
        found.retried, found.example::text AS example
    FROM found
    CROSS JOIN LATERAL (
        SELECT last_error, event_type, exchange FROM {schema}.message_state
        WHERE state = 'parked' AND id = found.example
        LIMIT 1
    ) AS row
    LEFT JOIN behind ON behind.failure = found.failure
""")
QUARANTINED_GROUPS = SQL("""
    SELECT NULL AS failure, {schema}.cause(route.reason) AS cause, waiting.event_type, route.exchange AS place,
        waiting.count, route.since AS first_at, coalesce(route.probed_at, route.since) AS last_at,
        waiting.keys_held, waiting.rows_held, route.probes::bigint AS retried, route.id::text AS example
    FROM {schema}.quarantine AS route
    JOIN (
        SELECT quarantine, event_type,
            count(*) FILTER (WHERE NOT is_behind) AS count,
            count(DISTINCT (aggregate_type, aggregate_id)) FILTER (WHERE is_behind) AS keys_held,
            count(*) FILTER (WHERE is_behind) AS rows_held
        FROM (
            SELECT quarantine, event_type, aggregate_type, aggregate_id,
                coalesce(starts_with(last_error, 'waits behind message '), false) AS is_behind
            FROM {schema}.message_state WHERE state = 'quarantined'
        ) AS row
        GROUP BY quarantine, event_type
    ) AS waiting ON waiting.quarantine = route.id
    ORDER BY route.id
""")
# The first of a key has failed; a message without an error waits behind it.
HELD_GROUPS = SQL("""
    WITH behind AS (
        SELECT consumer_name, key, count(*) AS rows FROM {schema}.held_message
        WHERE last_failed_at IS NULL GROUP BY consumer_name, key
    )
    SELECT NULL AS failure, {schema}.cause(concat_ws(': ', exception, error)) AS cause, event_type,
        consumer_name AS place, count(*) AS count, min(first_failed_at) AS first_at, max(last_failed_at) AS last_at,
        count(DISTINCT key) AS keys_held, coalesce(sum(behind.rows), 0)::bigint AS rows_held,
        sum(attempts)::bigint AS retried, min(position)::text AS example
    FROM {schema}.held_message LEFT JOIN behind USING (consumer_name, key)
    WHERE last_failed_at IS NOT NULL
    GROUP BY consumer_name, event_type, cause
""")


def list_groups(connection: psycopg.Connection, schema: str) -> list[Group]:
    """Return the groups of parked rows and of quarantined routes, the largest first."""
    rows = [
        *_read(connection, groups_statement(schema), FailureKind.PARKED, failure=None),
        *_merged(_read(connection, _sql(schema, QUARANTINED_GROUPS), FailureKind.QUARANTINED)),
    ]
    return _largest_first(rows)


def list_held_groups(connection: psycopg.Connection, schema: str) -> list[Group]:
    """Return the groups of the messages that consumers hold, in the database of their inbox."""
    return _largest_first(_merged(_read(connection, _sql(schema, HELD_GROUPS), FailureKind.HELD)))


async def list_letter_groups(broker: BrokerSettings, queue: str) -> list[Group]:
    """Return the groups of a queue's dead letters; every letter is read, and stays where it is."""
    found: dict[str, Group] = {}

    def take(letter: Letter) -> None:
        group = group_of_letter(letter)
        known = found.get(group.id)
        found[group.id] = group if known is None else _together(known, group)

    await read_letters(broker, queue, Selection(), lambda held: take(held.letter))
    return _largest_first(found.values())


def group_of_letter(letter: Letter) -> Group:
    """Return the group of one dead letter, with this letter alone."""
    return Group(
        id=letter.failure,
        kind=FailureKind.DEAD_LETTER,
        cause=letter.cause,
        event_type=letter.type,
        place=letter.exchange,
        count=1,
        first_at=letter.first_failed_at or letter.last_failed_at,
        last_at=letter.last_failed_at,
        retried=letter.attempts or 0,
        example=letter.message_id,
    )


def read_parked_group(connection: psycopg.Connection, schema: str, failure: str) -> Group:
    """Return one group of parked rows.

    Raises:
        NotFoundError: no parked row is in it.
    """
    for group in _read(connection, groups_statement(schema), FailureKind.PARKED, failure=failure):
        return group
    raise NotFoundError(f"no parked row is in group {failure}: see `relay failures list`")


def groups_statement(schema: str) -> Composed:
    """Return the SELECT of the groups of parked rows."""
    return _sql(schema, PARKED_GROUPS)


def _read(
    connection: psycopg.Connection, statement: Composed, kind: FailureKind, *, failure: str | None = None
) -> list[Group]:
    with connection.cursor(row_factory=class_row(_Counts)) as cursor:
        rows = cursor.execute(statement, {"failure": failure, "limit": MOST_GROUPS}).fetchall()
    return [_group(row, kind) for row in rows]


def _group(row: _Counts, kind: FailureKind) -> Group:
    cause = row.cause or ""
    return Group(
        id=row.failure or failure_id(kind, cause, row.event_type, row.place),
        kind=kind,
        cause=cause,
        event_type=row.event_type,
        place=row.place,
        count=row.count,
        first_at=row.first_at,
        last_at=row.last_at,
        keys_held=row.keys_held,
        rows_held=row.rows_held,
        retried=int(row.retried),
        example=row.example,
    )


def _merged(groups: Iterable[Group]) -> list[Group]:
    """Return one group for each id."""
    found: dict[str, Group] = {}
    for group in groups:
        found[group.id] = _together(found[group.id], group) if group.id in found else group
    return list(found.values())


def _together(known: Group, more: Group) -> Group:
    return replace(
        known,
        count=known.count + more.count,
        first_at=min(filter(None, (known.first_at, more.first_at)), default=None),
        last_at=max(filter(None, (known.last_at, more.last_at)), default=None),
        keys_held=known.keys_held + more.keys_held,
        rows_held=known.rows_held + more.rows_held,
        retried=known.retried + more.retried,
    )


def _largest_first(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: (-group.count, group.id))


def _sql(schema: str, statement: SQL) -> Composed:
    return statement.format(schema=Identifier(schema))
