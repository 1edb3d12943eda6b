"""Count the files that a reader opens on each way: a row until it is sent, a message until the inbox, a Spark row.

    python -m tests.doors

It counts the Python files below relay/engine, relay/consume or outbox_spark whose functions run for one row, one
message or one row of Spark. An import does not count. A row and a message pass several times, and a file counts when it
runs in each passage: what only some need is timers' work.
"""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import aio_pika
import psycopg
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings, RelaySettings, Settings
from relay.consume import Consumer, Inbox, Message, on
from relay.engine.node import Node
from relay.operate.migrate import migrate
from tests.support.eventually import eventually
from tests.support.postgres import PostgresServer
from tests.support.queues import declare_bound
from tests.support.rabbitmq import RabbitServer

ROOT = Path(__file__).parents[1]
QUEUE = "billing"
PASSAGES = 8
INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    VALUES ('customer', '17', 'InvoiceIssued', '{}')
"""
SENT = "SELECT NOT EXISTS (SELECT FROM outbox.message WHERE state = 'pending')"


@contextmanager
def files_that_run(folder: str) -> Iterator[set[str]]:
    """Note the files below a folder whose functions are called, here and in new threads."""
    files: set[str] = set()
    below = str(ROOT / folder) + "/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # The body of a module or a class has no optimized locals: it runs when the file is imported.
        if event == "call" and code.co_flags & CO_OPTIMIZED and code.co_filename.startswith(below):
            files.add(code.co_filename.removeprefix(str(ROOT) + "/"))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def doors(folder: str, passage: Callable[[], Awaitable[None]]) -> set[str]:
    """Return the files that every passage opens."""
    always: set[str] | None = None
    for _ in range(PASSAGES):
        await asyncio.sleep(0.3)
        with files_that_run(folder) as opened:
            await passage()
        always = opened if always is None else always & opened
    return always or set()


async def follow_row(settings: Settings, connection: psycopg.AsyncConnection) -> set[str]:
    """Follow rows from INSERT until each is marked."""

    async def is_sent() -> bool:
        cursor = await connection.execute(SENT)
        return await cursor.fetchone() == (True,)

    async def passage() -> None:
        await connection.execute(INSERT)
        await eventually(is_sent, "the row is sent")

    node = Node(settings)
    running = asyncio.create_task(node.run())
    await eventually(node.is_ready, "the relay is ready")
    opened = await doors("relay/engine", passage)
    node.start_draining()
    await running
    return opened


async def follow_message(settings: Settings, connection: psycopg.AsyncConnection) -> set[str]:
    """Follow messages from the queue until each has its inbox row and is acknowledged."""

    @on("InvoiceIssued")
    async def project(_: Message, __: psycopg.AsyncConnection) -> None:
        pass

    consumer = Consumer(QUEUE, [project], inbox=Inbox(settings.database, "projection"), broker=settings.broker)
    running = asyncio.create_task(consumer.run(signals=False))
    await eventually(lambda: not consumer.hindrances(), "the consumer is ready")

    async def passage() -> None:
        node = Node(settings)
        relaying = asyncio.create_task(node.run())
        acknowledged = consumer.counters.acknowledged
        await connection.execute(INSERT)
        await eventually(lambda: consumer.counters.acknowledged > acknowledged, "the message is acknowledged")
        node.start_draining()
        await relaying

    opened = await doors("relay/consume", passage)
    consumer.stop()
    await running
    return opened


async def main() -> None:
    from tests.spark.one_row import billing_options, follow_spark_row  # imports PySpark

    with PostgresServer() as postgres, RabbitServer(schedulers=1) as rabbitmq:
        settings = Settings(
            database=DatabaseSettings(url=SecretStr(postgres.create_database("doors"))),
            broker=BrokerSettings(url=SecretStr(rabbitmq.url())),
            relay=RelaySettings(heartbeat_interval=5.0, node_timeout=30.0),
        )
        migrate(settings.database)
        async with await aio_pika.connect(rabbitmq.url()) as broker:
            await declare_bound(await broker.channel(), QUEUE)
            url = settings.database.url.get_secret_value()
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                await connection.execute((ROOT / "examples" / "pipeline" / "billing.sql").read_text())
                for what, opened in (
                    ("a row, from INSERT to sent", await follow_row(settings, connection)),
                    ("a message, from queue to inbox", await follow_message(settings, connection)),
                    (
                        "a row of Spark, from its writer to its commit",
                        await asyncio.to_thread(follow_spark_row, billing_options(url)),
                    ),
                ):
                    print(f"{len(opened):3} files for {what}")
                    print("".join(f"      {name}\n" for name in sorted(opened)), end="")


if __name__ == "__main__":
    asyncio.run(main())
