"""Which sent rows: the filter of a replay, its conditions in SQL, and what there is to select from."""

from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from relay.servers.postgres.database import one
from relay.servers.postgres.tables import Tables

FOREVER = datetime(1, 1, 1, tzinfo=UTC)
# Marks add rows at the end of their day, which has no index by time. A range of blocks is read without one.
BLOCKS_OF_DAY = SQL("""
    SELECT pg_relation_size(to_regclass(format('%%I.message_sent_%%s', %(schema)s::text, %(day)s::text))) / 8192
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSelection:
    """A filter; what is `None` selects nothing away. `since` and `until` mean the time of sending."""

    message_ids: list[UUID] | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    event_type: str | None = None
    since: datetime | None = None
    until: datetime | None = None  # exclusive

    def as_json(self) -> dict[str, Any]:
        """Return what is set, for the table `replay` and for people."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: _plain(value) for name, value in given.items()}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "SentSelection":
        known = {each.name for each in fields(cls)} & stored.keys()
        values = {name: stored[name] for name in known}
        for name in ("since", "until"):
            if name in values:
                values[name] = datetime.fromisoformat(values[name])
        if "message_ids" in values:
            values["message_ids"] = [UUID(text) for text in values["message_ids"]]
        return cls(**values)

    def conditions(self) -> Composed:
        """Return the conditions on a row's columns as SQL that needs no parameters; without the time of sending."""
        parts: list[Composable] = [SQL("true")]
        if self.message_ids is not None:
            ids = Literal([str(each) for each in self.message_ids])
            parts.append(SQL("message_id = ANY ({}::uuid[])").format(ids))
        words = {name: getattr(self, name) for name in ("aggregate_type", "aggregate_id", "event_type")}
        parts += [
            SQL("{} = {}").format(Identifier(name), Literal(word)) for name, word in words.items() if word is not None
        ]
        return SQL(" AND ").join(parts)

    def times_before(self, moment: datetime) -> dict[str, Composed]:
        """Return `since` and `until` as SQL; constants, so that the planner leaves out the days that are not meant."""
        until = moment if self.until is None else min(self.until, moment)
        times = {"since": self.since or FOREVER, "until": until}
        return {name: SQL("{}::timestamptz").format(Literal(time.isoformat())) for name, time in times.items()}


@dataclass(frozen=True, slots=True)
class Day:
    """How many rows are selected of a day."""

    day: date
    rows: int


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """Rows that match but for the time: they were not sent yet."""

    pending: int
    parked: int


COUNT_BY_DAY = SQL("""
    SELECT (sent_at AT TIME ZONE 'UTC')::date AS day, count(*)
    FROM {schema}.sent({since}, {until})
    WHERE {conditions}
    GROUP BY day
    ORDER BY day
""")


def count_by_day(tables: Tables, selection: SentSelection) -> list[Day]:
    """Count the rows that a replay made now would select."""
    statement = count_statement(tables.schema, selection, now(tables.connection))
    return [Day(day, rows) for day, rows in tables.execute(statement)]


def count_statement(schema: str, selection: SentSelection, moment: datetime) -> Composed:
    """Return the SELECT of what was sent before the moment, by day."""
    return COUNT_BY_DAY.format(
        schema=Identifier(schema), conditions=selection.conditions(), **selection.times_before(moment)
    )


COUNT_WAITING = SQL("""
    SELECT count(*) FILTER (WHERE state = 'pending'), count(*) FILTER (WHERE state = 'parked')
    FROM {schema}.message_state
    WHERE state IN ('pending', 'parked') AND {conditions}
""")


def count_waiting(tables: Tables, selection: SentSelection) -> WaitingRows:
    """Count the rows that match and were not sent yet."""
    return WaitingRows(*tables.one(COUNT_WAITING, conditions=selection.conditions()))


FIRST_DAY = SQL("""
    SELECT min(substring(pg_get_expr(part.relpartbound, part.oid) FROM $$FROM \\('([^']+)'\\)$$)::timestamptz)
    FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
    WHERE inhparent = to_regclass({parent}) AND NOT inhdetachpending
""")


def first_day(tables: Tables) -> datetime | None:
    """Return from when on sent rows are kept: what was sent before was dropped by retention, or never was here."""
    parent = Literal(f"{tables.schema}.message_sent")
    (first,) = tables.one(FIRST_DAY, parent=parent)
    return first.astimezone(UTC) if first else None


def now(connection: psycopg.Connection) -> datetime:
    """Return the database's time: sent rows carry it."""
    moment: datetime
    (moment,) = one(connection.execute("SELECT clock_timestamp()").fetchone())
    return moment.astimezone(UTC)


def blocks_of_day(tables: Tables, day: date) -> int:
    """Return how many blocks of 8 KiB the sent rows of a day fill; 0 when it has no table."""
    (blocks,) = tables.one(BLOCKS_OF_DAY, {"schema": tables.schema, "day": f"{day:%Y%m%d}"})
    return int(blocks or 0)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return [str(each) for each in value] if isinstance(value, list) else value
