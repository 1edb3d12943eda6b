"""Failure groups: what failed, grouped by its cause, event type, and exchange or queue.

Parked rows are grouped by the tables that a trigger keeps (migrations/versions/0015_jobs.py): a count of a million
reads no row. Held messages and routes are grouped when they are read. Dead letters lie in the broker: who reads them
groups them (`group_letters`).
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from psycopg.sql import SQL
from pydantic import Field

from relay.errors import NotFoundError
from relay.operate.asked import MAX_ID, Closed, QueueName, Text
from relay.operate.cause import cause_of
from relay.operate.letters.letter import SOURCE, Letter, LetterSelection
from relay.operate.letters.read import list_letters
from relay.operate.letters.work import queues_of
from relay.operate.operation import Role, Servers, operation
from relay.operate.routes.quarantine import SOURCE as OF_ROUTES
from relay.operate.routes.quarantine import failing_routes, route_group
from relay.servers.postgres.tables import Tables


class Where(StrEnum):
    """What the failures of a group are, and so which commands repair them."""

    PARKED = "parked"
    QUARANTINE = OF_ROUTES
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


def list_parked_groups(tables: Tables) -> list[Group]:
    """Return the groups of parked rows, the largest first, without rows that only wait behind another one."""
    return _read(tables, PARKED)


def list_groups(tables: Tables) -> list[Group]:
    """Return the groups of parked rows and of routes in quarantine, the largest first of each."""
    return [*list_parked_groups(tables), *list_route_groups(tables)]


def by_weight(groups: Iterable[Group]) -> list[Group]:
    """Return groups of any source, the largest first."""
    return sorted(groups, key=lambda group: -group.count)


def list_route_groups(tables: Tables) -> list[Group]:
    """Return the groups of routes in quarantine; their count is that of the rows that wait for them."""
    groups: dict[str, Group] = {}
    for route in failing_routes(tables):
        cause = cause_of(route.reason)
        id_ = route_group(route.reason, route.exchange)
        merged = groups.get(id_)
        groups[id_] = Group(
            id=id_,
            source=Where.QUARANTINE,
            cause=cause,
            event_type="",
            place=route.exchange,
            count=(merged.count if merged else 0) + route.failed,
            first_at=min(merged.first_at or route.since, route.since) if merged else route.since,
            last_at=max(merged.last_at or route.since, route.since) if merged else route.since,
            keys_held=0,
            rows_held=(merged.rows_held if merged else 0) + route.behind,
            retried=0,
        )
    return sorted(groups.values(), key=lambda group: (-group.count, group.id))


def list_held_groups(tables: Tables) -> list[Group]:
    """Return the groups of messages that consumers hold, by consumer, the largest first; `schema` is the inbox's."""
    return _read(tables, HELD)


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


def with_retries(tables: Tables, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with what the database knows of their retries."""
    ids = {"ids": [group.id for group in groups]}
    retried: dict[str, int] = dict(tables.execute(RETRIED, ids).fetchall())
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


def _read(tables: Tables, statement: SQL) -> list[Group]:
    return tables.rows(Group, statement)


class ListFailures(Closed):
    """Which groups."""

    held: Annotated[bool, Field(description="Also the messages that consumers of this database hold.")] = False
    group: Annotated[Text | None, Field(description="Only the group of this id.")] = None
    limit: Annotated[int, Field(ge=1, le=MAX_ID, description="The largest so many; `total` counts all.")] = 100


class LookForFailures(ListFailures):
    """Which queues to look at, too."""

    queue: Annotated[tuple[QueueName, ...], Field(max_length=10, description="Also the dead letters of these.")]


@dataclass(frozen=True, slots=True)
class Failures:
    """Groups of failures, and letters that a delivery limit of their queue may drop."""

    groups: list[Group]  # the largest first, as many as were asked for
    total: int  # groups in all
    warnings: list[str]


@operation("failures.list", "GET /failures", Role.VIEWER)
def list_(at: Servers, asked: ListFailures) -> Failures:
    """List groups: parked rows, routes in quarantine, and with `held` what consumers hold."""
    return _failures(at, asked, ())


@operation("failures.look", "POST /failures/look", Role.OPERATOR)
def look(at: Servers, asked: LookForFailures) -> Failures:
    """List groups, those of dead letters included: a look takes letters out of their queue for a moment."""
    return _failures(at, asked, asked.queue)


def _failures(at: Servers, asked: ListFailures, queues: Sequence[str]) -> Failures:
    warnings: list[str] = []
    with at.connect(None) as tables:
        groups = list_groups(tables)
        for queue in queues:
            _, dead = queues_of(queue)
            letters, read = asyncio.run(list_letters(at.settings.broker, dead, LetterSelection()))
            groups += with_retries(tables, group_letters(letters, dead))
            warnings += [read.warning] if read.warning else []
        if asked.held:
            groups += list_held_groups(tables)
    chosen = by_weight(each for each in groups if asked.group is None or each.id == asked.group)
    return Failures(chosen[: asked.limit], len(chosen), warnings)
