"""Count the files that a reader opens to follow one row from INSERT to sent, and one message from queue to inbox.

    python -m tests.doors

A file counts when one of its functions runs in each of several passages. What some need is timers' work.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
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


class Doors:
    """The files below a folder of the project in which functions run."""

    def __init__(self, folder: str) -> None:
        self._folder = str(ROOT / folder) + "/"
        self.opened: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(self._folder):
            self.opened.add(name.removeprefix(str(ROOT) + "/"))


async def doors(folder: str, passage: Callable[[], Awaitable[None]]) -> set[str]:
    """Return the files that every passage opens."""
    always: set[str] | None = None
    for _ in range(PASSAGES):
        await asyncio.sleep(0.3)
        seen = Doors(folder)
        sys.setprofile(seen)
        try:
            await passage()
        finally:
            sys.setprofile(None)
        always = seen.opened if always is None else always & seen.opened
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
                for what, opened in (
                    ("a row, from INSERT to sent", await follow_row(settings, connection)),
                    ("a message, from queue to inbox", await follow_message(settings, connection)),
                ):
                    print(f"{len(opened):3} files for {what}")
                    print("".join(f"      {name}\n" for name in sorted(opened)), end="")


if __name__ == "__main__":
    asyncio.run(main())
