"""How long the rows took that were sent last."""

from dataclasses import dataclass
from datetime import timedelta

from psycopg.sql import SQL

from relay.operate.sent.selection import now
from relay.servers.postgres.tables import Tables

BLOCKS = 32  # of 8 KiB at the end of today's sent rows: some hundred to some thousand rows

# Marks add rows at the end of their day, which has no index by time. A range of blocks is read without one.
END = SQL("""
    SELECT pg_relation_size(to_regclass(format('%%I.message_sent_%%s', %(schema)s::text, %(day)s::text))) / 8192
""")
READ = SQL("""
    SELECT count(*) AS rows,
           percentile_cont(0.5) WITHIN GROUP (ORDER BY taken) AS median_s,
           percentile_cont(0.95) WITHIN GROUP (ORDER BY taken) AS p95_s
    FROM (
        SELECT extract(epoch FROM sent_at - greatest(created_at, available_at))::float8 AS taken
        FROM {schema}.message
        WHERE state = 'sent' AND sent_at >= {since} AND sent_at < {until} AND sent_at > now() - interval '1 minute'
            AND isfinite(greatest(created_at, available_at)) AND ctid >= format('(%%s,0)', %(block)s::bigint)::tid
    ) AS row
""")


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from the time a row was due until it was marked as sent, of the rows of the last minute."""

    rows: int
    median_s: float | None
    p95_s: float | None


def read_latency(tables: Tables) -> Latency:
    """Return how long the last rows took, at the cost of a few blocks."""
    today = now(tables.connection).replace(hour=0, minute=0, second=0, microsecond=0)
    (end,) = tables.one(END, {"schema": tables.schema, "day": f"{today:%Y%m%d}"})
    if end is None:
        return Latency(0, None, None)
    # As text of the statement, so that the planner leaves out the other days.
    days = {"since": today.isoformat(), "until": (today + timedelta(days=1)).isoformat()}
    return Latency(*tables.one(READ, {"block": max(0, end - BLOCKS)}, **days))
