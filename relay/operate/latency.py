"""How long the rows took that were sent last."""

from dataclasses import dataclass
from datetime import timedelta

import psycopg
from psycopg.rows import class_row
from psycopg.sql import SQL, Identifier

from relay.operate.sent.selection import now

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


def read_latency(connection: psycopg.Connection, schema: str) -> Latency:
    """Return how long the last rows took, at the cost of a few blocks."""
    today = now(connection).replace(hour=0, minute=0, second=0, microsecond=0)
    found = connection.execute(END, {"schema": schema, "day": f"{today:%Y%m%d}"}).fetchone()
    if found is None or found[0] is None:
        return Latency(0, None, None)
    # As text of the statement, so that the planner leaves out the other days.
    days = {"since": today.isoformat(), "until": (today + timedelta(days=1)).isoformat()}
    statement = READ.format(schema=Identifier(schema), **days)
    with connection.cursor(row_factory=class_row(Latency)) as cursor:
        row = cursor.execute(statement, {"block": max(0, found[0] - BLOCKS)}).fetchone()
    return row or Latency(0, None, None)
