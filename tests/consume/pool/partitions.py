"""Messages for a pool, with the header by which they find their partition."""

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import uuid4

import aio_pika
from aio_pika.abc import AbstractChannel

from relay.consume.failed.queues import partition_queue_names
from relay.publisher.lane import lane_of


@dataclass
class Partitions:
    """The exchange and the queues of this test's pool, with a publisher."""

    channel: AbstractChannel
    name: str

    async def send(self, numbers: Iterable[int], *, keys: int = 1) -> None:
        """Publish messages, over all keys in turn, and wait for the confirms."""
        exchange = await self.channel.get_exchange(f"{self.name}.partitions", ensure=False)
        for number in numbers:
            key = f"key-{number % keys}"
            await exchange.publish(
                aio_pika.Message(
                    b"%d" % number,
                    message_id=str(uuid4()),
                    type="Counted",
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                    headers={
                        "x-aggregate-type": "counter",
                        "x-aggregate-id": key,
                        "x-outbox-lane": lane_of(b"counter", key.encode()),
                    },
                ),
                "",
            )

    async def ready_count(self) -> int:
        """Return how many messages wait in the queues of all partitions."""
        declared = [await self.channel.declare_queue(name, passive=True) for name in partition_queue_names(self.name)]
        return sum(each.declaration_result.message_count or 0 for each in declared)
