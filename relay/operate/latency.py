"""How long the rows took that were sent last."""

from datetime import timedelta

from psycopg.sql import SQL

from relay.operate.sent.selection import blocks_of_day, now
from relay.servers.postgres.tables import Tables

BLOCKS = 32  # of 8 KiB at the end of today's sent rows: some hundred to some thousand rows

READ = SQL("""
    SELECT percentile_cont(0.95) WITHIN GROUP (
        ORDER BY extract(epoch FROM sent_at - greatest(created_at, available_at))::float8)
    FROM {schema}.message
    WHERE state = 'sent' AND sent_at >= {since} AND sent_at < {until} AND sent_at > now() - interval '1 minute'
        AND isfinite(greatest(created_at, available_at)) AND ctid >= format('(%%s,0)', %(block)s::bigint)::tid
""")


def read_latency(tables: Tables) -> float | None:
    """Return the p95 of how long the rows of the last minute took, in seconds; None: no row was sent.

    A row takes from the time it is due until it is marked as sent. The answer costs a few blocks.
    """
    today = now(tables.connection).replace(hour=0, minute=0, second=0, microsecond=0)
    end = blocks_of_day(tables, today)
    # As text of the statement, so that the planner leaves out the other days.
    days = {"since": today.isoformat(), "until": (today + timedelta(days=1)).isoformat()}
    p95_s: float | None
    (p95_s,) = tables.one(READ, {"block": max(0, end - BLOCKS)}, **days)
    return p95_s
