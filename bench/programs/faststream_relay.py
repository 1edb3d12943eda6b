"""A relay by faststream-outbox, as its page on relays sets one up: `faststream_relay.py WORKERS BATCH FLUSH`.

It runs in the peers' environment. FastStream logs two lines a message by default; here it logs warnings only.
"""

import logging
import os
import sys
from typing import Any

import uvloop
from faststream import FastStream
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange
from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import create_async_engine

TABLE = QUEUE = "faststream_outbox"


async def relay(body: dict[str, Any]) -> dict[str, Any]:
    return body


async def run(workers: int, batch_size: int, flush_size: int) -> None:
    logger = logging.getLogger(TABLE)
    logger.setLevel(logging.WARNING)
    metadata = MetaData()
    table = make_outbox_table(metadata, table_name=TABLE)
    url = os.environ["PEER_DATABASE_URL"].replace("postgresql://", "postgresql+asyncpg://", 1)
    engine = create_async_engine(url, pool_size=workers + 1)
    rabbit = RabbitBroker(os.environ["PEER_BROKER_URL"], logger=logger)
    outbox = OutboxBroker(engine, outbox_table=table, logger=logger)
    publisher = rabbit.publisher(
        routing_key=os.environ["PEER_ROUTING_KEY"],
        exchange=RabbitExchange(os.environ["PEER_EXCHANGE"], type=ExchangeType.TOPIC, durable=True),
        persist=True,
    )
    subscriber = outbox.subscriber(
        QUEUE, max_workers=workers, fetch_batch_size=batch_size, terminal_flush_batch_size=flush_size
    )
    publisher(subscriber(relay))

    async def make_table() -> None:
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
            await connection.execute(text(outbox_autovacuum_ddl(TABLE)))

    async def say_ready() -> None:
        print("ready", flush=True)

    app = FastStream(outbox, on_startup=[make_table, rabbit.connect], after_startup=[say_ready])
    await app.run()


if __name__ == "__main__":
    uvloop.run(run(*map(int, sys.argv[1:])))
