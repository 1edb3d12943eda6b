"""What a large batch costs live traffic: `python -m bench.batch`.

500,000 rows are committed in one transaction, one for each customer, as `format("outbox")` does it, or an UPDATE with a
trigger that writes events. Their keys are in half of the lanes. While the relay publishes them, applications write
steadily, for some of these customers and for others. Commit to confirm is measured, next to the same load alone.
"""

from functools import partial

import psycopg

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.drains import clear
from bench.frame.error import BenchmarkError
from bench.frame.run import Bench, Column, Count, Figures, Positive, main, quantile
from bench.frame.servers import private_servers
from bench.frame.watch import wait_drained
from bench.frame.watched_relay import WatchedRelay, watched_relay
from bench.frame.writers import PAYLOAD, write_steadily
from relay.engine.session.session import LANES

FIRST_OTHER = LANES // 2  # the batch has the lanes below
WARM_UP = 3.0  # seconds

WRITE = """
    WITH customer AS MATERIALIZED (
        SELECT row_number() OVER () AS number, key::text
        FROM generate_series(1, 4 * %(rows)s) AS key
        WHERE hashtextextended(%(aggregate_type)s || '/' || key, 0) & %(lanes)s < %(first_other)s
        LIMIT %(rows)s
    )
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT %(aggregate_type)s, customer.key, %(event_type)s, %(payload)s::json
    FROM customer
    ORDER BY number
"""
LANE_OF = "SELECT id, lane FROM outbox.message WHERE id = ANY(%s)"


def measure(
    *, rows: Count = 500_000, rounds: Count = 3, rate: Positive = 200.0, seconds: Positive = 10.0, run: Bench
) -> None:
    """Measure live traffic during a large batch. Exit code 1 when a message was lost.

    Parameters
    ----------
    rows
        Of the batch.
    rounds
        How often, after a warm-up.
    rate
        Rows a second that applications write meanwhile, one a transaction, in all lanes.
    seconds
        For how long; the batch should take longer.
    """
    waits = run.table(
        f"p99 of commit to confirm beside {rows:,} rows in one transaction, ms",
        Column("in other lanes", "others", 1),
        Column("in the batch's lanes", "shared", 1),
        Column("rows of the batch sent meanwhile", "published"),
    )
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers, watched_relay(servers) as watched:
        with run.status("warming up"):
            _p99(watched, rate, WARM_UP, rows=0)
        alone, beside = (partial(_p99, watched, rate, seconds, rows=each) for each in (0, rows))
        waits.measure({"alone": alone, "while the batch is published": beside}, rounds)


def _p99(watched: WatchedRelay, rate: float, seconds: float, *, rows: int) -> Figures:
    """Return p99 in the other lanes and in the batch's, how much of the batch went out meanwhile, and what was lost."""
    servers = watched.servers
    clear(servers, same_ids=False)
    if rows:
        _write_batch(servers.database_url, rows)
    commits = write_steadily(watched.writers, servers.database_url, rate, seconds)
    published = queue.depth(servers.broker_url) if rows else 0
    if rows and published >= rows:
        raise BenchmarkError(f"the batch was out before the {seconds:g} s were over: take more --rows")
    wait_drained(watched.watch, watched.relay)
    lane_of: dict[int, int] = dict(watched.watch.execute(LANE_OF, [[commit.id for commit in commits]]).fetchall())
    others = watched.waits([commit for commit in commits if lane_of[commit.id] >= FIRST_OTHER])
    shared = watched.waits([commit for commit in commits if lane_of[commit.id] < FIRST_OTHER])
    lost = rows + len(commits) - queue.depth(servers.broker_url)
    return {"others": quantile(others, 0.99), "shared": quantile(shared, 0.99), "published": published, "lost": lost}


def _write_batch(database_url: str, rows: int) -> None:
    values = {
        "aggregate_type": table.AGGREGATE_TYPE,
        "event_type": table.EVENT_TYPE,
        "payload": PAYLOAD,
        "rows": rows,
        "lanes": LANES - 1,
        "first_other": FIRST_OTHER,
    }
    with psycopg.connect(database_url) as connection:
        connection.execute(WRITE, values)


if __name__ == "__main__":
    main(measure)
