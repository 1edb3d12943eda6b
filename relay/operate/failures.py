"""Failure groups: what failed, grouped by its cause, event type, and exchange or queue.

Parked rows are grouped by the tables that a trigger keeps (migrations/versions/0015_jobs.py): a count of a million
reads no row. Held messages and routes are grouped when they are read. Dead letters lie in the broker: who reads them
groups them (`group_letters`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

import psycopg
from psycopg.rows import class_row
from psycopg.sql import SQL, Identifier

from relay.errors import NotFoundError
from relay.operate.cause import cause_of, group_of
from relay.operate.letters.letter import SOURCE, Letter
from relay.operate.routes.quarantine import RouteStatus, list_routes


class Where(StrEnum):
    """What the failures of a group are, and so which commands repair them."""

    PARKED = "parked"
    QUARANTINE = "quarantine"
    HELD = "held"
    DEAD_LETTER = SOURCE


@dataclass(frozen=True, slots=True)
class Group:
    """Failures of one cause."""

    id: str
    source: Where
    cause: str
    event_type: str  # empty: of any
    place: str  # the exchange, or the queue of the letters; of held messages the consumer
    count: int
    first_at: datetime | None
    last_at: datetime | None
    keys_held: int  # ordering keys that wait behind these failures
    rows_held: int  # messages of these keys
    retried: int  # messages of this group that operators have retried, until retention forgets it

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Where(self.source))


# A row behind one that has gone is a head itself (parked.py). Its words name no cause but the row that it waited for.
PARKED = SQL("""
    WITH heads AS (
        SELECT failure, count(*) AS count, min(parked_at) AS first_at, max(parked_at) AS last_at
        FROM (
            SELECT failure, parked_at FROM {schema}.parked_failure WHERE held_behind IS NULL
            UNION ALL
            SELECT failure, parked_at FROM {schema}.parked_failure AS row
            WHERE held_behind IS NOT NULL
                AND NOT EXISTS (SELECT FROM {schema}.parked_failure AS before WHERE before.id = row.held_behind)
        ) AS head
        GROUP BY failure
    ), held AS (
        SELECT head.failure, count(DISTINCT head.id) AS keys, count(*) AS rows
        FROM {schema}.parked_failure AS row JOIN {schema}.parked_failure AS head ON head.id = row.held_behind
        GROUP BY head.failure
    )
    SELECT failure.id, failure.source, failure.cause, failure.event_type, failure.place, heads.count, heads.first_at,
        heads.last_at, coalesce(held.keys, 0) AS keys_held, coalesce(held.rows, 0) AS rows_held, failure.retried
    FROM heads JOIN {schema}.failure ON failure.id = heads.failure LEFT JOIN held ON held.failure = heads.failure
    ORDER BY heads.count DESC, failure.id
""")

# A message that was never tried only waits behind another one of its key.
HELD = SQL("""
    WITH failed AS (
        SELECT {schema}.failure_cause(concat_ws(': ', exception, error)) AS cause, event_type, consumer_name AS place,
            count(*) AS count, min(first_failed_at) AS first_at, max(last_failed_at) AS last_at,
            sum(behind.rows) AS rows_held, count(*) FILTER (WHERE behind.rows > 0) AS keys_held
        FROM {schema}.held_message AS message
        CROSS JOIN LATERAL (
            SELECT count(*) AS rows FROM {schema}.held_message AS other
            WHERE other.consumer_name = message.consumer_name AND other.key = message.key
                AND other.position > message.position AND other.attempts = 0
        ) AS behind
        WHERE message.attempts > 0
        GROUP BY 1, 2, 3
    )
    SELECT {schema}.failure_group('held', cause, event_type, place) AS id, 'held' AS source, cause, event_type, place,
        count, first_at, last_at, keys_held, rows_held::bigint, 0 AS retried
    FROM failed
    ORDER BY count DESC, 1
""")
RETRIED = SQL("SELECT id, retried FROM {schema}.failure WHERE id = ANY (%(ids)s) AND retried > 0")


def list_parked_groups(connection: psycopg.Connection, schema: str) -> list[Group]:
    """Return the groups of parked rows, the largest first, without rows that only wait behind another one."""
    return _read(connection, schema, PARKED)


def list_groups(connection: psycopg.Connection, schema: str) -> list[Group]:
    """Return the groups of parked rows and of routes in quarantine, the largest first of each."""
    return [*list_parked_groups(connection, schema), *list_route_groups(connection, schema)]


def by_weight(groups: Iterable[Group]) -> list[Group]:
    """Return groups of any source, the largest first."""
    return sorted(groups, key=lambda group: -group.count)


def list_route_groups(connection: psycopg.Connection, schema: str) -> list[Group]:
    """Return the groups of routes in quarantine; their count is that of the rows that wait for them."""
    groups: dict[str, Group] = {}
    for route in _failing_routes(connection, schema):
        cause = cause_of(route.reason)
        id_ = route_group(route.reason, route.exchange)
        merged = groups.get(id_)
        groups[id_] = Group(
            id=id_,
            source=Where.QUARANTINE,
            cause=cause,
            event_type="",
            place=route.exchange,
            count=(merged.count if merged else 0) + route.rows - route.behind,
            first_at=min(merged.first_at or route.since, route.since) if merged else route.since,
            last_at=max(merged.last_at or route.since, route.since) if merged else route.since,
            keys_held=0,
            rows_held=(merged.rows_held if merged else 0) + route.behind,
            retried=0,
        )
    return sorted(groups.values(), key=lambda group: (-group.count, group.id))


def routes_of_group(connection: psycopg.Connection, schema: str, group: str) -> list[RouteStatus]:
    """Return the routes of a group, the oldest first.

    Raises:
        NotFoundError: no route in quarantine is of this group.
    """
    routes = [each for each in _failing_routes(connection, schema) if route_group(each.reason, each.exchange) == group]
    if not routes:
        raise NotFoundError(f"no route of failure group {group} is in quarantine: see `relay failures list`")
    return routes


def _failing_routes(connection: psycopg.Connection, schema: str) -> list[RouteStatus]:
    """Return the routes in quarantine that nobody has paused: a pause is no failure."""
    return [each for each in list_routes(connection, schema) if each.paused_at is None]


def route_group(reason: str, exchange: str) -> str:
    """Return the id of the group of a route in quarantine."""
    return group_of(Where.QUARANTINE, cause_of(reason), None, exchange)


def list_held_groups(connection: psycopg.Connection, schema: str) -> list[Group]:
    """Return the groups of messages that consumers hold, by consumer, the largest first; `schema` is the inbox's."""
    return _read(connection, schema, HELD)


def group_letters(letters: Iterable[Letter], queue: str) -> list[Group]:
    """Return the groups of dead letters of a queue, the largest first; `with_retries` adds their retries."""
    groups: dict[str, Group] = {}
    for letter in letters:
        id_, failed_at = letter.group, letter.last_failed_at
        group = groups.get(id_) or Group(
            id=id_,
            source=Where.DEAD_LETTER,
            cause=letter.cause,
            event_type=letter.type or "",
            place=queue,
            count=0,
            first_at=letter.first_failed_at or failed_at,
            last_at=failed_at,
            keys_held=0,
            rows_held=0,
            retried=0,
        )
        first = [moment for moment in (group.first_at, letter.first_failed_at, failed_at) if moment]
        last = [moment for moment in (group.last_at, failed_at) if moment]
        groups[id_] = replace(
            group, count=group.count + 1, first_at=min(first, default=None), last_at=max(last, default=None)
        )
    return sorted(groups.values(), key=lambda group: (-group.count, group.id))


def with_retries(connection: psycopg.Connection, schema: str, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with what the database knows of their retries."""
    ids = {"ids": [group.id for group in groups]}
    retried: dict[str, int] = dict(connection.execute(RETRIED.format(schema=Identifier(schema)), ids).fetchall())
    return [replace(group, retried=retried.get(group.id, group.retried)) for group in groups]


def read_group(groups: Sequence[Group], id_: str) -> Group:
    """Return the group of this id.

    Raises:
        NotFoundError: it is not among them.
    """
    for group in groups:
        if group.id == id_:
            return group
    raise NotFoundError(f"there is no failure group {id_} now: see `relay failures list`")


def _read(connection: psycopg.Connection, schema: str, statement: SQL) -> list[Group]:
    with connection.cursor(row_factory=class_row(Group)) as cursor:
        return cursor.execute(statement.format(schema=Identifier(schema))).fetchall()
