"""A relay by txoutbox, as its README sets one up: `txoutbox_relay.py BATCH CONCURRENCY`, in the peers' environment.

txoutbox leaves the publisher to its user. This one is aio-pika with publisher confirms: a call returns when the broker
has confirmed the message.
"""

import os
import sys
from datetime import timedelta

import aio_pika
import asyncpg
import uvloop
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage

TABLE = "txoutbox"


async def run(batch_size: int, concurrency: int) -> None:
    async with (
        asyncpg.create_pool(os.environ["PEER_DATABASE_URL"]) as pool,
        await aio_pika.connect_robust(os.environ["PEER_BROKER_URL"]) as connection,
    ):
        storage = PostgresStorage(pool, table=TABLE, notify_channel=TABLE)
        await storage.create_schema()
        channel = await connection.channel(publisher_confirms=True)
        exchange = await channel.get_exchange(os.environ["PEER_EXCHANGE"])

        async def publish(message: OutboxMessage) -> None:
            sent = aio_pika.Message(
                message.payload,
                content_type="application/json",
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                message_id=str(message.id),
                headers=message.headers,
            )
            await exchange.publish(sent, routing_key=message.topic)

        config = RelayConfig(batch_size=batch_size, concurrency=concurrency, lease=timedelta(seconds=60))
        relay = Relay(storage, publish, config=config)
        async with await storage.listen(relay.wake):
            print("ready", flush=True)
            await relay.run(handle_signals=True)


if __name__ == "__main__":
    uvloop.run(run(int(sys.argv[1]), int(sys.argv[2])))
