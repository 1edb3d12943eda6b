"""Note each measurement once, in order per sensor, through restarts of everything: python -m examples.durable.consumer.

The queue must exist (`relay topology apply`): a consumer declares nothing. A queue that is declared again on a
reconnect hides that the old one is gone with what was in it.
"""

import asyncio

import psycopg
import structlog

from relay.config.loading import load
from relay.config.settings import Settings
from relay.consume import Consumer, Inbox, Message, on
from relay.errors import BrokerUnavailableError, DatabaseUnavailableError
from relay.observe.log import set_up
from relay.runtime.backoff import backoff
from relay.servers.postgres.database import connect_async

log = structlog.get_logger("examples.durable")

TABLE = """
    CREATE TABLE IF NOT EXISTS measurement (
        position bigint GENERATED ALWAYS AS IDENTITY,
        message_id uuid NOT NULL, -- not unique: should the inbox let one through twice, it shows
        sensor text NOT NULL,
        number bigint NOT NULL
    )
"""


@on("Measured")
async def note(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute(
        "INSERT INTO measurement (message_id, sensor, number) VALUES (%s, %s, %s)",
        (message.message_id, message.aggregate_id, message.json()["number"]),
    )


async def consume(settings: Settings) -> None:
    """Consume until SIGTERM; servers that are not there yet are waited for, also at the start."""
    failures = 0
    while True:
        consumer = Consumer("measurements", [note], inbox=Inbox(settings.database, "example"), broker=settings.broker)
        try:
            async with await connect_async(settings.database) as connection:
                await connection.execute(TABLE)
            return await consumer.run()
        except (BrokerUnavailableError, DatabaseUnavailableError) as error:
            failures += 1
            log.warning("consumer.waiting", reason=str(error))
            await asyncio.sleep(backoff(failures, 0.1, 2.0))


if __name__ == "__main__":
    loaded = load().settings
    set_up(loaded.log)
    asyncio.run(consume(loaded))
