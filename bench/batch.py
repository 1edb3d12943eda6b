"""What a large batch costs live traffic: `python -m bench.batch`.

A million rows are committed in one transaction, as `format("outbox")` does it, with keys in half of the lanes. While
the relay publishes them, applications write steadily. Their rows in the batch's lanes come behind it; for the others,
commit to confirm is measured, next to the same load without a batch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psycopg
from cyclopts import App

from bench.frame import backlog as table
from bench.frame import queue, report
from bench.frame.command import Count, Positive, main
from bench.frame.error import BenchmarkError
from bench.frame.watch import wait_drained
from bench.frame.writers import PAYLOAD, write_steadily
from bench.latency_case import Stand, clear, standing
from bench.programs.confirms import read_confirms
from relay.engine.session.session import LANES

FIRST_OTHER = LANES // 2  # the batch has the lanes below
CUSTOMERS = 20_000
WARM_UP = 3.0  # seconds

WRITE = """
    WITH customer AS MATERIALIZED (
        SELECT row_number() OVER () AS number, key::text
        FROM generate_series(1, 4 * %(customers)s) AS key
        WHERE hashtextextended(%(aggregate_type)s || '/' || key, 0) & %(lanes)s < %(first_other)s
        LIMIT %(customers)s
    )
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT %(aggregate_type)s, customer.key, %(event_type)s, %(payload)s::json
    FROM generate_series(1, %(rows)s) AS n
    JOIN customer ON customer.number = n %% %(customers)s + 1
    ORDER BY n
"""
LANE_OF = "SELECT id, lane FROM outbox.message WHERE id = ANY(%s)"

app = App(name="python -m bench.batch", help="Measure live traffic beside a large batch.", version_flags=[])
console = report.open_console()


@dataclass(frozen=True, slots=True)
class Beside:
    """One round: the 99th percentile from the COMMIT's answer to the confirm, milliseconds.

    Attributes:
        shared: of rows in the batch's lanes, which come behind it.
        published: rows of the batch that went out while the others were written.
    """

    alone: float
    others: float
    shared: float
    published: int
    lost: int


@app.default
def batch(*, rows: Count = 1_000_000, rounds: Count = 3, rate: Positive = 200.0, seconds: Positive = 20.0) -> int:
    """Print a table; write JSON to bench/results/. Exit code 1 when a message was lost.

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
    measured: list[Beside] = []
    with standing(console) as stand:
        with console.status("warming up"):
            _p99(stand, rate, WARM_UP, rows=0)
        for number in range(1, rounds + 1):
            with console.status(f"round {number} of {rounds}"):
                alone, _, _, lost = _p99(stand, rate, seconds, rows=0)
                others, shared, published, lost_beside = _p99(stand, rate, seconds, rows=rows)
            measured.append(Beside(alone, others, shared, published, lost + lost_beside))
            console.print(
                f"{number}/{rounds}  p99 alone {alone:.1f} ms, in other lanes beside the batch {others:.1f} ms"
            )
    _report(measured, rows)
    report.print_files(console, report.write_json("batch", {"rows": rows, "rounds": [asdict(one) for one in measured]}))
    return 1 if any(one.lost for one in measured) else 0


def _p99(stand: Stand, rate: float, seconds: float, *, rows: int) -> tuple[float, float, int, int]:
    """Give p99 in the other lanes and in the batch's, how much of the batch went out meanwhile, and what was lost."""
    clear(stand)
    if rows:
        _write_batch(stand.servers.database_url, rows)
    commits = write_steadily(stand.writers, stand.servers.database_url, rate, seconds)
    published = queue.depth(stand.servers.broker_url) if rows else 0
    if rows and published >= rows:
        raise BenchmarkError(f"the batch was out before the {seconds:g} s were over: take more --rows")
    wait_drained(stand.watch, stand.relay)
    confirmed_at = read_confirms(stand.confirms)
    lane_of: dict[int, int] = dict(stand.watch.execute(LANE_OF, [[commit.id for commit in commits]]).fetchall())
    waits: dict[bool, list[float]] = {True: [], False: []}
    for commit in commits:
        if commit.id in confirmed_at:
            is_other = lane_of[commit.id] >= FIRST_OTHER
            waits[is_other].append(1000 * (confirmed_at[commit.id] - commit.returned_at))
    others, shared = (report.quantile(sorted(waits[is_other]), 0.99) for is_other in (True, False))
    return others, shared, published, rows + len(commits) - queue.depth(stand.servers.broker_url)


def _write_batch(database_url: str, rows: int) -> None:
    values = {
        "aggregate_type": table.AGGREGATE_TYPE,
        "event_type": table.EVENT_TYPE,
        "payload": PAYLOAD,
        "rows": rows,
        "customers": CUSTOMERS,
        "lanes": LANES - 1,
        "first_other": FIRST_OTHER,
    }
    with psycopg.connect(database_url) as connection:
        connection.execute(WRITE, values)


def _report(measured: Sequence[Beside], rows: int) -> None:
    cases = {
        "alone": "alone",
        "in other lanes, while the batch is published": "others",
        "in the batch's lanes, behind it": "shared",
    }
    spreads = {name: report.spread([getattr(one, field) for one in measured]) for name, field in cases.items()}
    lines = [[name, each.shown(1), each.range_shown(1)] for name, each in spreads.items()]
    lost = sum(one.lost for one in measured)
    title = f"p99 of commit to confirm beside {rows:,} rows in one transaction, ms: {len(measured)} rounds; lost {lost}"
    report.print_table(console, title, ["", "median", "lowest-highest"], lines)


if __name__ == "__main__":
    main(app)
