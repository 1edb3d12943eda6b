"""What a failed message says in the log: one line for people, and where in the handler it was."""

import asyncio
import subprocess
import sys
import traceback
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Message, Permanent, Retries, on
from tests.consume.effects import MakeConsumer, Queue, Table, running
from tests.consume.process import environment
from tests.support.eventually import eventually

NO_CHANCE = Retries(attempts=2, initial=0.5, jitter=0.0)


def deeper() -> None:
    raise RuntimeError("boom\nwith a second line")


@on("Counted")
async def fail(message: Message, connection: psycopg.AsyncConnection) -> None:
    deeper()


@on("Counted")
def fail_in_a_thread(message: Message, connection: psycopg.Connection) -> None:
    deeper()


@pytest.mark.parametrize("handler", [fail, fail_in_a_thread])
@pytest.mark.parametrize("order", ["hold", "skip"])
async def test_each_failure_is_one_line_and_the_first_shows_where(
    handler: Any, order: str, *, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    message_id = await queue.send(1, key="17")

    consumer = make_consumer(handler, order=order, retries=NO_CHANCE)
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.dead_letters["exhausted"] == 1, "it is a dead letter")

    first, second, dead = (event for event in events if event["event"] in ("message.failed", "message.dead"))
    assert first["summary"] == "Counted counter/17: RuntimeError: boom (try 1 of 2, again in 0.5 s)"
    assert second["summary"] == "Counted counter/17: RuntimeError: boom (try 2 of 2, exhausted)"
    assert dead["summary"] == f"Counted {message_id}: RuntimeError: boom (exhausted: now in billing.dead)"
    _, _, trace = first["exc_info"]
    assert [frame.name for frame in traceback.extract_tb(trace)] == [handler.__name__, "deeper"]
    assert second["exc_info"] is None
    assert type(dead["reason"]) is str


async def test_a_failure_that_is_permanent_says_so(queue: Queue, table: Table, make_consumer: MakeConsumer) -> None:
    @on("Counted")
    async def refuse(message: Message, connection: psycopg.AsyncConnection) -> None:
        raise Permanent("the invoice was\x1b[2J cancelled")

    await queue.send(1, key="17")

    consumer = make_consumer(refuse)
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.dead_letters["permanent"] == 1, "it is a dead letter")

    (line,) = [event["summary"] for event in events if event["event"] == "message.failed"]
    assert line.startswith("Counted counter/17: relay.consume.classify.Permanent: the invoice was\\x1b[2J cancelled")
    assert line.endswith("(try 1, permanent)")


PROGRAM = """
import asyncio, os
from relay.consume import Consumer, Inbox
from tests.consume.test_failure_log import fail, NO_CHANCE
from relay.consume import FailurePolicy

async def main():
    consumer = Consumer("billing", [fail], inbox=Inbox(os.environ["TEST_DATABASE_URL"], "mute"),
        broker=os.environ["TEST_BROKER_URL"], failures=FailurePolicy(retries=NO_CHANCE))
    running = asyncio.create_task(consumer.run())
    while not consumer.counters.dead_letters:
        await asyncio.sleep(0.05)
    consumer.stop()
    await running

asyncio.run(main())
"""


async def test_a_consumer_without_a_configured_log_says_on_stderr_what_it_gives_up(
    queue: Queue, table: Table, database: DatabaseSettings, broker: BrokerSettings
) -> None:
    await queue.send(1, key="17")

    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", PROGRAM],
        env=environment(database, broker),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    said = done.stderr.splitlines()
    assert said[0] == "WARNING message.failed: Counted counter/17: RuntimeError: boom (try 1 of 2, again in 0.5 s)"
    assert said[1].endswith("in fail")
    assert said[-1].startswith("ERROR message.dead: Counted ")
    assert "<Reason" not in done.stderr
    assert not done.stdout
