"""How soon the pages of the console answer over a large outbox: `python -m bench.console`. See docs/benchmarks.md."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path

import aio_pika
import httpx
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.error import BenchmarkError
from bench.frame.relay import SCRIPTS
from bench.frame.run import Bench, Column, Count, Figures, Shown, main, quantile
from bench.frame.servers import Servers, private_servers
from bench.frame.watch import watching
from bench.table import retain
from relay.consume.classify import Failure, FailureReason
from relay.consume.failed.envelope import dead_letter
from relay.testing.servers.process import Process, free_port, wait_for

LIMIT = 300.0  # milliseconds that a page may take, but for the slowest twentieth
START_SECONDS = 30.0
SETTLE = 15.0  # seconds after the start in which the console looks for the first time
LOOK_SECONDS = 60.0  # that the broker takes for the letters, and the console for a look
CAUSES = 40  # as many groups
CONSUMED, DEAD = "bench.orders", "bench.orders.dead"
BODY = b'{"order": 1}'
TOKEN = re.compile(r"\?token=(\S+)")
LETTERS = re.compile(r'href="/failures/([0-9a-f]{12})">RuntimeError')

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
    letters: Count = 1_000_000,
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
    letters
        Dead letters of one queue.
    """
    pages = run.table(
        f"Pages over {sent_rows:,} sent and {parked_rows:,} parked rows, {letters:,} letters; milliseconds",
        Column("p95", "p95", 0, Shown.HIGHEST),
        Column("p50", "p50", 0, Shown.MEDIAN),
        Column("longest", "longest", 0, Shown.HIGHEST),
    )
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers:
        with run.status(f"writing {sent_rows:,} sent and {parked_rows:,} parked rows"):
            retain(servers, sent_rows)
            paths = fill(servers, parked_rows)
        with run.status(f"giving up {letters:,} messages"):
            asyncio.run(give_up(servers.broker_url, letters))
            wait_for(lambda: queue.depth(servers.broker_url, DEAD) == letters, "the letters are there", LOOK_SECONDS)
        with serving(servers) as (address, token), asking(address, token) as client:
            time.sleep(SETTLE)
            paths.append(look(client))
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


async def give_up(broker_url: str, letters: int) -> None:
    """Put so many letters into the queue of dead letters."""
    async with await aio_pika.connect(broker_url) as connection:
        channel = await (await connection.channel(publisher_confirms=False)).get_underlay_channel()
        for name in (CONSUMED, DEAD):
            await channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        came = Basic.Properties(
            message_type="OrderPlaced", headers={"x-aggregate-type": "order", "x-aggregate-id": "7"}, delivery_mode=2
        )
        delivered = DeliveredMessage(
            delivery=Basic.Deliver("", 1, redelivered=False, exchange=queue.EXCHANGE, routing_key="order.OrderPlaced"),
            header=ContentHeader(properties=came),
            body=BODY,
            channel=channel,
        )
        now = datetime.now(UTC)
        failure = Failure(
            attempts=5,
            first_failed_at=now,
            failed_at=now,
            exception="RuntimeError",
            words="not today",
            reason=FailureReason.EXHAUSTED,
        )
        for number in range(letters):
            came.message_id = f"id-{number}"
            sent = dead_letter(delivered, failure, "orders")
            await channel.basic_publish(BODY, routing_key=DEAD, properties=sent)


def look(client: httpx.Client) -> str:
    """Look at the dead letters; return the page of their group."""
    if client.post("/failures/looks", data={"queue": CONSUMED}).status_code != HTTPStatus.SEE_OTHER:
        raise BenchmarkError("the console does not look at the dead letters")
    ends = time.monotonic() + LOOK_SECONDS
    while (group := LETTERS.search(client.get("/failures").text)) is None:
        if time.monotonic() > ends:
            raise BenchmarkError("no group of dead letters is seen")
        time.sleep(1)
    return f"/failures/{group[1]}"


@contextmanager
def serving(servers: Servers) -> Iterator[tuple[str, str]]:
    """Yield the address of a console that has no login, and the token of its start."""
    listen = f"127.0.0.1:{free_port()}"
    config = Path(servers.folder, "relay.toml")
    config.write_text(f'[[topology.queues]]\nname = "{CONSUMED}"\n')
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": servers.database_url,
        "RELAY_BROKER_URL": servers.broker_url,
        "RELAY_CONSOLE_LISTEN": listen,
        "RELAY_CONFIG": str(config),
    }
    log = Path(servers.folder, "console.log")
    process = Process([SCRIPTS / "relay", "console"], log=log, environment=environment)
    try:
        process.wait_until(lambda: is_there(f"http://{listen}"), START_SECONDS)
        printed = TOKEN.search(log.read_text())
        if printed is None:
            raise BenchmarkError("the console has not printed its address")
        yield f"http://{listen}", printed[1]
    finally:
        process.stop(signal.SIGTERM)


def asking(address: str, token: str) -> httpx.Client:
    """Return a client that brings the token."""
    return httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}, timeout=60)


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
