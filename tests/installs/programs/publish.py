"""Publish an event outside of any transaction, buffered by the table."""

import asyncio
import sys

from relay.outbox import Event
from relay.publisher import DurablePublisher


async def publish(database: str, broker: str) -> None:
    async with DurablePublisher(database, broker=broker, name="sensors") as publisher:
        await publisher.publish(Event("sensor", "42", "Measured", {"celsius": 21.5}))
        assert publisher.state.confirmed == 1, publisher.state


asyncio.run(publish(*sys.argv[1:]))
