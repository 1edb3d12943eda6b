"""A relay, a consumer with an inbox in a separate database, and messages that it forgets: the command brings them."""

import asyncio
import json
import shlex
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika
import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from tests.cli.command import Command, Result
from tests.consume.effects import running
from tests.consume.policies import QUICK
from tests.operate.inboxes import Ends
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

MESSAGES = 120


@on("*")
async def take(message: Message, connection: psycopg.AsyncConnection) -> None:
    """Change nothing: what counts here is the inbox."""


@asynccontextmanager
async def delivering(relay: Command) -> AsyncIterator[None]:
    """Run a relay during the test."""
    with relay.start("run") as process:
        yield
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate, timeout=30)


@pytest.mark.parametrize(("forgotten", "repeats"), [(3, 0), (MESSAGES - 20, 20)], ids=["by id", "by time"])
async def test_what_a_consumer_has_forgotten_is_named_and_the_command_brings_it(
    forgotten: int, repeats: int, relay: Command, ends: Ends, inbox_url: str, broker_url: str, broker: BrokerSettings
) -> None:
    relay.variables["RELAY_BROKER_URL"] = broker_url

    async def reconcile() -> Result:
        arguments = ("--since", "1h", "--grace", "0s", "--inbox", inbox_url, "--output", "json", "--limit", "1000")
        return await asyncio.to_thread(relay.process, "reconcile", *arguments)

    async with await aio_pika.connect(broker_url) as connection:
        await declare_bound(await connection.channel(), "billing")
    inbox = Inbox(DatabaseSettings(url=SecretStr(inbox_url)), "billing")
    consumer = Consumer("billing", [take], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK))
    async with running(consumer):
        async with delivering(relay):
            for number in range(MESSAGES):
                ends.rows.pending(str(number))
            await eventually(lambda: consumer.counters.applied == MESSAGES, "all are applied", 60)
        before = await reconcile()
        gone = ends.inbox.execute(
            "DELETE FROM outbox.processed_message WHERE message_id IN"
            " (SELECT message_id FROM outbox.processed_message LIMIT %s) RETURNING message_id",
            [forgotten],
        ).fetchall()
        found = await reconcile()
        report = json.loads(found.out)
        mended = await asyncio.to_thread(relay.process, *shlex.split(report["mend"]["command"])[1:])
        await eventually(lambda: consumer.counters.applied == MESSAGES + forgotten, "they are applied again", 60)
        after = await reconcile()

    assert (before.code, found.code, mended.code, after.code) == (0, 1, 0, 0), before.err + mended.err + after.err
    (billing,) = report["consumers"]
    assert sorted(each["message_id"] for each in billing["missing_first"]) == sorted(str(each) for (each,) in gone)
    assert json.loads(after.out)["mend"] is None
    assert consumer.counters.duplicates <= repeats
