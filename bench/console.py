"""How soon the pages of the console answer over a large outbox: `python -m bench.console`. See docs/benchmarks.md."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from bench.frame import backlog as table
from bench.frame.relay import SCRIPTS
from bench.frame.run import Bench, Column, Count, Figures, Shown, main, quantile
from bench.frame.servers import Servers, private_servers
from bench.frame.watch import watching
from bench.table import retain
from tests.support.process import Process, free_port

LIMIT = 300.0  # milliseconds that a page may take, but for the slowest twentieth
START_SECONDS = 30.0
SETTLE = 15.0  # seconds after the start in which the console looks for the first time
CAUSES = 40  # as many groups

# A trigger notes the cause of each row: tens of seconds for a million.
PARK = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, last_error, parked_at)
    SELECT 'order', (n / 2)::text, 'OrderPlaced', '{"order": 1}', 'parked',
        'the broker refuses it: cause ' || chr(65 + (n %% %(causes)s)::integer), now() - n * interval '1 ms'
    FROM generate_series(1, %(rows)s) AS n
"""
CLEAR_UP = "VACUUM (FREEZE, ANALYZE)"
SOME = """
    SELECT (SELECT min(id) FROM outbox.message_parked), (SELECT min(failure) FROM outbox.parked_failure),
        (SELECT min(sent_at)::date FROM outbox.message WHERE state = 'sent')
"""


def measure(
    *,
    rounds: Count = 1,
    requests: Count = 40,
    sent_rows: Count = 10_000_000,
    parked_rows: Count = 1_000_000,
    run: Bench,
) -> None:
    """Measure how soon each page answers. Exit code 1 when one takes too long, or fails.

    Parameters
    ----------
    rounds
        How often each page is measured.
    requests
        Requests of a page in a round, one after the other.
    sent_rows
        Sent rows of ten days.
    parked_rows
        Parked rows of forty causes.
    """
    pages = run.table(
        f"Pages over {sent_rows:,} sent and {parked_rows:,} parked rows; milliseconds to the last byte",
        Column("p95", "p95", 0, Shown.HIGHEST),
        Column("p50", "p50", 0, Shown.MEDIAN),
        Column("longest", "longest", 0, Shown.HIGHEST),
    )
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers:
        with run.status(f"writing {sent_rows:,} sent and {parked_rows:,} parked rows"):
            retain(servers, sent_rows)
            paths = fill(servers, parked_rows)
        with serving(servers) as address, httpx.Client(base_url=address, timeout=60) as client:
            time.sleep(SETTLE)
            pages.measure({path: partial(answer, client, path, requests) for path in paths}, rounds)
    for side in dict.fromkeys(one.side for one in pages.taken):
        figures = [one.figures for one in pages.taken if one.side == side]
        if max(each["p95"] for each in figures) > LIMIT:
            run.fail(f"{side} takes longer than {LIMIT:.0f} ms")
        if failed := sum(each["failed"] for each in figures):
            run.fail(f"{side}: {failed:.0f} requests failed")


def fill(servers: Servers, rows: int) -> list[str]:
    """Park so many rows, two a key; return the pages to ask for."""
    with watching(servers.database_url) as connection:
        connection.execute(PARK, {"rows": rows, "causes": CAUSES})
        connection.execute(CLEAR_UP)
        row, group, day = connection.execute(SOME).fetchone() or (0, "", None)
    return [
        "/", "/messages", f"/messages/{row}", "/messages?state=parked", "/messages?state=sent", "/messages?key=77",
        f"/messages?state=sent&until={day}T12:00:00Z", "/failures", f"/failures/{group}", "/jobs", "/replay",
        "/reconcile", "/nodes", "/retention", "/batches", "/doctor", "/audit",
    ]  # fmt: skip


@contextmanager
def serving(servers: Servers) -> Iterator[str]:
    """Yield the address of a console that has no login."""
    listen = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": servers.database_url,
        "RELAY_BROKER_URL": servers.broker_url,
        "RELAY_CONSOLE_LISTEN": listen,
    }
    process = Process([SCRIPTS / "relay", "console"], log=Path(servers.folder, "console.log"), environment=environment)
    try:
        process.wait_until(lambda: is_there(f"http://{listen}"), START_SECONDS)
        yield f"http://{listen}"
    finally:
        process.stop(signal.SIGTERM)


def is_there(address: str) -> bool:
    """Whether the console answers."""
    try:
        return httpx.get(f"{address}/static/console.css").is_success
    except httpx.TransportError:
        return False


def answer(client: httpx.Client, path: str, requests: int) -> Figures:
    """Ask for a page again and again."""
    took, failed = [], 0
    for _ in range(requests):
        asked = time.monotonic()
        failed += not client.get(path).is_success
        took.append(1000 * (time.monotonic() - asked))
    took.sort()
    return {"p50": quantile(took, 0.5), "p95": quantile(took, 0.95), "longest": took[-1], "failed": failed}


if __name__ == "__main__":
    main(measure)
