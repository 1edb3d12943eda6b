"""Look at the table while the relay works, at next to no cost to it."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, LiteralString

import psycopg

from bench.frame.error import BenchmarkError
from relay.engine.session.session import LANES
from relay.testing.servers.process import Process

POLL = 0.05  # seconds between two looks
TOO_LONG = 600.0

# The first of these lanes that has a row. Each is looked at from its end, where a row lives as long as there is one.
# From the front, every look would walk over the index entries of all rows that are already gone.
FIRST_PENDING = """
    SELECT place
    FROM unnest(%s::smallint[]) WITH ORDINALITY AS l (lane, place)
    CROSS JOIN LATERAL (
        SELECT FROM outbox.message_pending AS row WHERE row.lane = l.lane ORDER BY row.lane DESC, row.id DESC LIMIT 1
    ) AS last
    LIMIT 1
"""

WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8"


def watching(database_url: str) -> psycopg.Connection:
    """Open the connection to look with."""
    # Statistics of an empty table would make the planner read the whole of a full one.
    options = "-c enable_seqscan=off -c enable_bitmapscan=off"
    return psycopg.connect(database_url, autocommit=True, options=options, application_name="bench")


def value(
    connection: psycopg.Connection, query: LiteralString, values: Sequence[Any] | Mapping[str, Any] | None = None
) -> Any:
    """Return the first column of a query's only row."""
    row = connection.execute(query, values).fetchone()
    assert row is not None, "each of these queries gives a row"
    return row[0]


def wait_drained(watch: psycopg.Connection, relay: Process, *, look: Callable[[], None] = lambda: None) -> float:
    """Return once no row is pending, and tell since when (monotonic), late by POLL at most. Nobody may write any more.

    `look` is called all the time.

    Raises:
        BenchmarkError: the relay ended before, or rows are still pending after TOO_LONG; it shows its last words.
    """
    lanes = list(range(LANES))

    def is_drained() -> bool:
        # Under an old snapshot a look at an empty lane walks over all that it ever held. So it is not looked at again,
        # and the time of the last look, which sees what there was when it began, does not count.
        nonlocal lanes
        first = watch.execute(FIRST_PENDING, [lanes]).fetchone()
        if first is not None:
            lanes = lanes[first[0] - 1 :]
        return first is None

    return wait_until(is_drained, relay, look=look)


def wait_until(is_drained: Callable[[], bool], relay: Process, *, look: Callable[[], None] = lambda: None) -> float:
    """Return once `is_drained()` holds, and tell since when (monotonic), late by POLL at most.

    `look` is called all the time.

    Raises:
        BenchmarkError: the relay ended before, or rows are still pending after TOO_LONG; it shows its last words.
    """
    deadline = time.monotonic() + TOO_LONG
    while True:
        began = time.monotonic()
        if is_drained():
            return began
        if not relay.is_running():
            raise BenchmarkError(f"the relay ended before the table was empty:\n{relay.log_end()}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"rows are still pending after {TOO_LONG:g} s:\n{relay.log_end()}")
        look()
        time.sleep(POLL)
