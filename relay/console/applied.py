"""What consumers apply: how many messages a second, and when the last one. Only the newest pages of the inbox are read.

The inbox has no index by time, and a consumer writes its rows behind the others. So the last pages of each day have
what was applied of late, and a look costs the same however long the inbox is. Rows that fill the room of rolled-back
ones stand elsewhere, and are missed for a moment.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

from psycopg.sql import SQL, Composed, Identifier

from relay.servers.postgres.tables import Tables

WINDOW = 60.0  # seconds over which the rate is measured
PAGES = 64  # that are read of a day
DAYS = 8  # that are read at most, the newest of those that have changed
MOST = 200  # consumers and queues; anyone with the role of consumers may write a name

# Without the right to read a table anyone may see its size, and how many rows were inserted.
READ_DAYS = SQL("""
    SELECT CASE WHEN part.relname ~ '_[0-9]{{8}}$' THEN to_date(right(part.relname, 8), 'YYYYMMDD')
            ELSE date '1970-01-01' END AS day,
        pg_relation_size(part.oid) / current_setting('block_size')::bigint AS pages,
        pg_stat_get_tuples_inserted(part.oid) AS inserted
    FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
    WHERE inhparent = to_regclass({table}) AND NOT inhdetachpending
    ORDER BY day DESC
""")
TAIL = SQL("""
        SELECT {is_cut} AS is_cut, message_day, consumer_name, processed_at FROM {schema}.processed_message
        WHERE message_day = {day} AND ctid >= {first}::tid AND processed_at <= now() AND isfinite(processed_at)
""")
READ_APPLIED = SQL("""
    WITH tail AS MATERIALIZED ({tails}),
        span AS (
            SELECT greatest(now() - {window} * interval '1 second', max(first)) AS since
            FROM (SELECT min(processed_at) AS first FROM tail WHERE is_cut GROUP BY message_day) AS cut
        )
    SELECT consumer_name AS consumer, max(processed_at) AS last_at,
        (count(*) FILTER (WHERE processed_at > since)
            / greatest(1, extract(epoch FROM now() - since)))::float8 AS rate
    FROM tail CROSS JOIN span
    GROUP BY consumer_name, since
    ORDER BY count(*) DESC
    LIMIT {most}
""")
READ_NOTED = SQL("""
    SELECT consumer_name AS consumer, queue FROM {schema}.consumer_queue
    ORDER BY started_at DESC, consumer_name, queue LIMIT {most}
""")


@dataclass(frozen=True, slots=True)
class Noted:
    """Which queue a consumer consumes, as it has noted at its last start."""

    consumer: str
    queue: str


@dataclass(frozen=True, slots=True)
class ConsumerProgress:
    """What a consumer has applied."""

    consumer: str
    last_at: datetime
    rate: float  # messages a second, of the last minute


@dataclass(frozen=True, slots=True)
class _Day:
    day: date
    pages: int
    inserted: int


class ProgressLooks:
    """Looks at the inbox again and again, and remembers when each consumer has applied its last message."""

    def __init__(self) -> None:
        self._inserted: dict[date, tuple[int, float]] = {}  # rows of each day, and when that has changed
        self._last: dict[str, datetime] = {}

    def look(self, tables: Tables) -> tuple[list[Noted], dict[str, ConsumerProgress]]:
        """Return which consumers there are, the last started first, and what they have applied by their name."""
        noted = tables.rows(Noted, READ_NOTED, most=MOST)
        applied = self._read(tables, self._changed(tables))
        for each in applied:
            known = self._last.get(each.consumer)
            self._last[each.consumer] = each.last_at if known is None else max(known, each.last_at)
        rates = {each.consumer: each.rate for each in applied}
        known_names = rates.keys() | {each.consumer for each in noted}
        self._last = {name: at for name, at in self._last.items() if name in known_names}
        return noted, {name: ConsumerProgress(name, at, rates.get(name, 0.0)) for name, at in self._last.items()}

    def _changed(self, tables: Tables) -> list[_Day]:
        """Return the days that got rows within the last minute, at the first look all; the newest of them."""
        now = time.monotonic()
        days = tables.rows(_Day, READ_DAYS, table=Identifier(tables.schema, "processed_message").as_string())
        for each in days:
            before = self._inserted.get(each.day)
            if before is None or before[0] != each.inserted:
                self._inserted[each.day] = each.inserted, now
        self._inserted = {each.day: self._inserted[each.day] for each in days}
        changed = [each for each in days if each.pages and self._inserted[each.day][1] > now - 2 * WINDOW]
        return changed[:DAYS]

    def _read(self, tables: Tables, days: Sequence[_Day]) -> list[ConsumerProgress]:
        if not days:
            return []
        tails = SQL(" UNION ALL ").join(_tail(tables, each) for each in days)
        return tables.rows(ConsumerProgress, READ_APPLIED, tails=tails, window=WINDOW, most=MOST)


def _tail(tables: Tables, day: _Day) -> Composed:
    first = max(0, day.pages - PAGES)
    return tables.sql(TAIL, day=day.day, first=f"({first},0)", is_cut=first > 0)
