"""Look at the table while the relay works, at next to no cost to it."""

import time

import psycopg

from bench.command import BenchmarkError
from tests.support.process import Process

POLL = 0.05  # seconds between two looks
TOO_LONG = 600.0

# Each lane is looked at from its end, where a row lives as long as there is one: from the front, every look
# would walk over the index entries of all rows that are already gone.
HAS_PENDING = """
    SELECT EXISTS (
        SELECT FROM generate_series(0, 15) AS l (lane)
        CROSS JOIN LATERAL (
            SELECT FROM outbox.message_pending AS row
            WHERE row.lane = l.lane::smallint ORDER BY row.lane DESC, row.id DESC LIMIT 1
        ) AS last
    )
"""


def watching(database_url: str) -> psycopg.Connection:
    """Open the connection to look with."""
    # Statistics of an empty table would make the planner read the whole of a full one.
    options = "-c enable_seqscan=off -c enable_bitmapscan=off"
    return psycopg.connect(database_url, autocommit=True, options=options, application_name="bench")


def wait_drained(watch: psycopg.Connection, relay: Process) -> None:
    """Return once no row is pending; late by POLL at most.

    Raises:
        BenchmarkError: the relay ended before, or rows are still pending after TOO_LONG; it shows its last words.
    """
    deadline = time.monotonic() + TOO_LONG
    while _has_pending(watch):
        if not relay.is_running():
            raise BenchmarkError(f"the relay ended before the table was empty:\n{relay.log_end()}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"rows are still pending after {TOO_LONG:g} s:\n{relay.log_end()}")
        time.sleep(POLL)


def _has_pending(watch: psycopg.Connection) -> bool:
    row = watch.execute(HAS_PENDING).fetchone()
    return row is not None and bool(row[0])
