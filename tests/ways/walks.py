"""The four ways that most readers go: a row, a message, a retry of many rows from the console, and a row of Spark."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aio_pika
import psycopg
from aio_pika.abc import AbstractChannel

from relay.config.settings import RelaySettings, Settings
from relay.consume import Consumer, Inbox
from relay.engine.node import Node
from tests.console.groups import group_page
from tests.console.site import browser, post, running
from tests.consume.effects import EFFECTS, Queue, count
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.queues import declare_bound
from tests.ways.trace import Tracer

BILLING = Path(__file__).parents[2] / "examples" / "pipeline" / "billing.sql"


class Way(NamedTuple):
    """A way through the code.

    Attributes:
        name: what goes it.
        most: files that a reader may have to open.
        walk: goes it some times on these servers, and returns the files that each passage opened.
    """

    name: str
    most: int
    walk: Callable[[Tracer, Settings], Awaitable[list[str]]]


async def walk_row(tracer: Tracer, settings: Settings) -> list[str]:
    """Follow rows from INSERT until each is marked."""
    url = settings.database.url.get_secret_value()
    rare = RelaySettings(heartbeat_interval=5.0, node_timeout=30.0)  # no heartbeat in each passage
    node = Node(settings.model_copy(update={"relay": rare}))
    async with channel_of(settings) as channel, await psycopg.AsyncConnection.connect(url, autocommit=True) as outbox:
        await declare_bound(channel, "billing")

        async def is_sent() -> bool:
            cursor = await outbox.execute("SELECT NOT EXISTS (SELECT FROM outbox.message WHERE state = 'pending')")
            return await cursor.fetchone() == (True,)

        async def passage() -> None:
            await outbox.execute(
                "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
                " VALUES ('customer', '17', 'InvoiceIssued', '{}')"
            )
            await eventually(is_sent, "the row is sent")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run())
            await eventually(node.is_ready, "the relay is ready")
            opened = await tracer.always_opened(passage)
            node.start_draining()
    return opened


async def walk_message(tracer: Tracer, settings: Settings) -> list[str]:
    """Follow messages from the queue until each has its row in the inbox and is acknowledged."""
    async with (
        channel_of(settings) as channel,
        await psycopg.AsyncConnection.connect(settings.database.url.get_secret_value(), autocommit=True) as database,
    ):
        await database.execute(EFFECTS)
        queue = Queue(channel)
        await queue.declare()
        consumer = Consumer(queue.name, [count], inbox=Inbox(settings.database, "projection"), broker=settings.broker)

        async def passage() -> None:
            acknowledged = consumer.counters.acknowledged
            await queue.send(1)
            await eventually(lambda: consumer.counters.acknowledged > acknowledged, "the message is acknowledged")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consumer.run(signals=False))
            await eventually(lambda: not consumer.hindrances(), "the consumer is ready")
            opened = await tracer.always_opened(passage)
            consumer.stop()
    return opened


async def walk_retry(tracer: Tracer, settings: Settings) -> list[str]:
    """Follow a failure group from its page until its rows are pending again, and its job is seen as done.

    What every page opens, such as the log-in, does not count. Nor does the console's look at the outbox after a change.
    """
    rows = Rows(settings.database.url.get_secret_value())
    async with running(settings) as app, browser(app) as client:

        async def passage() -> None:
            with rows.connection.transaction():
                row = rows.parked()
            path, _ = await group_page(client)
            ordered = await post(client, f"{path}/jobs", {"kind": "retry", "why": "mended"})
            await eventually(lambda: rows.states()[row][0] == "pending", "the row is retried")
            assert "done" in (await client.get(ordered.headers["Location"])).text

        async def another_page() -> None:
            sampler = app.state.site.sampler
            before = sampler.latest
            sampler.wake()
            await eventually(lambda: sampler.latest is not before, "the console has looked")
            await client.get("/runbooks")

        with rows.connection:
            opened = await tracer.always_opened(passage)
            shared = await tracer.always_opened(another_page)
    return [file for file in opened if file not in shared]


async def walk_spark_row(tracer: Tracer, settings: Settings) -> list[str]:
    """Follow rows from the writer of `df.write.format("outbox").save()` to its commit."""
    from tests.spark.one_row import billing_options, write_one_row  # imports PySpark

    url = settings.database.url.get_secret_value()
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(BILLING.read_text())
        number = iter(range(1000))

        async def passage() -> None:
            write_one_row(billing_options(url), next(number))

        return await tracer.always_opened(passage)


@asynccontextmanager
async def channel_of(settings: Settings) -> AsyncIterator[AbstractChannel]:
    async with await aio_pika.connect(settings.broker.url.get_secret_value()) as connection:
        yield await connection.channel()


WAYS = (
    Way("a row, from INSERT to sent", 20, walk_row),
    Way("a message, from the queue to the inbox", 18, walk_message),
    Way("a retry of many rows, from the console's button to the rows", 24, walk_retry),
    Way("a row of Spark, from its writer to its commit", 16, walk_spark_row),
)
