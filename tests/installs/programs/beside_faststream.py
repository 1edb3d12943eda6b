"""A consumer of ours in the lifespan of an application of FastStream, which has a subscriber of its queue.

faststream run --factory beside_faststream:make_app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import structlog
from faststream import FastStream
from faststream.rabbit import RabbitBroker, RabbitQueue

from relay.consume import Consumer, Inbox, Message, on

QUEUE = "billing"

structlog.configure(processors=[structlog.processors.JSONRenderer()])


@on("InvoiceIssued")
async def apply(message: Message, connection: psycopg.AsyncConnection) -> None:
    print(f"applied {message.message_id}", flush=True)


def make_app() -> FastStream:
    broker = RabbitBroker(os.environ["BROKER_URL"])

    @broker.subscriber(RabbitQueue("theirs"))  # type: ignore[untyped-decorator]  # FastStream is not in .venv
    async def take(body: str) -> None:
        print(f"took {body}", flush=True)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        inbox = Inbox(os.environ["DATABASE_URL"], "billing")
        async with Consumer(QUEUE, [apply], inbox=inbox, broker=os.environ["BROKER_URL"]):
            yield

    return FastStream(broker, lifespan=lifespan)
