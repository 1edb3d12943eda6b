"""How many messages went out of late, by address and event type."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from psycopg.sql import SQL

from relay.operate.sent.selection import blocks_of_day, now
from relay.servers.postgres.tables import Tables

BLOCKS = 512  # of 8 KiB, at most, of a day; of more, so many are read, evenly spread, and stand for the others
PIECES = 16  # ranges that they are read in
SPARE = 128  # blocks before the last end: marks of several relays fill the last blocks in any order
LONGEST = 60.0  # seconds: what was sent in a longer time is no rate of now
MOST = 1000  # kinds of a range that are told apart

# A mark that has not committed when its time is counted is in no count: some hundred rows at most.
COUNT = SQL("""
    SELECT exchange, routing_key, aggregate_type, event_type, count(*)
    FROM {schema}.message
    WHERE state = 'sent' AND sent_at >= {day} AND sent_at < {next_day}
        AND sent_at >= %(since)s AND sent_at < %(until)s
        AND ctid >= format('(%%s,0)', %(first)s::bigint)::tid AND ctid < format('(%%s,0)', %(end)s::bigint)::tid
    GROUP BY 1, 2, 3, 4
    ORDER BY 5 DESC
    LIMIT {most}
""")

Kind = tuple[str | None, str | None, str, str]  # exchange and routing key of the row, type of its key, event type


@dataclass(frozen=True, slots=True)
class _Look:
    at: datetime
    day: datetime
    end: int  # blocks of the day


@dataclass(slots=True)
class SentCounter:
    """Counts the rows that were marked since the last count, at the cost of the blocks that were written since."""

    _last: _Look | None = field(default=None)

    def count(self, tables: Tables) -> dict[Kind, float] | None:
        """Return the messages a second of each kind since the last count; None when that was long ago, or never."""
        at = now(tables.connection)
        day = at.replace(hour=0, minute=0, second=0, microsecond=0)
        last, look = self._last, _Look(at, day, blocks_of_day(tables, day))
        self._last = look
        if last is None or not 0 < (seconds := (look.at - last.at).total_seconds()) <= LONGEST:
            return None
        counted: defaultdict[Kind, float] = defaultdict(float)
        for each, first, end in _ranges(tables, last, look):
            days = {"day": each.isoformat(), "next_day": (each + timedelta(days=1)).isoformat()}
            for begin, stop, stand_for in _pieces(first, end):
                values = {"since": last.at, "until": look.at, "first": begin, "end": stop}
                for exchange, routing_key, aggregate_type, event_type, rows in tables.execute(
                    COUNT, values, most=MOST, **days
                ):
                    counted[exchange, routing_key, aggregate_type, event_type] += rows * stand_for / seconds
        return dict(counted)


def _ranges(tables: Tables, last: _Look, look: _Look) -> Iterator[tuple[datetime, int, int]]:
    """Yield the days that got rows, each with the first of the new blocks and the end."""
    if last.day != look.day:
        yield last.day, last.end, blocks_of_day(tables, last.day)
    yield look.day, last.end if last.day == look.day else 0, look.end


def _pieces(first: int, end: int) -> Iterator[tuple[int, int, float]]:
    """Yield ranges of blocks to read, each with how many times so many blocks it stands for."""
    if end - first <= BLOCKS:
        yield max(0, first - SPARE), end, 1.0
        return
    for piece in range(PIECES):
        begin = first + piece * (end - first) // PIECES
        yield begin, begin + BLOCKS // PIECES, (end - first) / BLOCKS
