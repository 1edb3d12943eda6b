"""Publish events that belong to no transaction, and lose no event while the broker is unreachable.

from relay.outbox import Event
from relay.publisher import DurablePublisher

async with DurablePublisher("postgresql://...", broker="amqp://...", name="sensors") as publisher:
    await publisher.publish(Event("sensor", "42", "Measured", {"celsius": 21.5}))

publish ──> broker, with a confirm                                     while the broker takes events
       └──> buffer: the outbox table, or a file ──> relay, or this process ──> broker    else, until the buffer is empty
"""

from relay.errors import importing

with importing("publisher"):
    from relay.publisher.blocking import BlockingPublisher
    from relay.publisher.publisher import DurablePublisher
    from relay.publisher.state import Mode, PublisherState

__all__ = ["BlockingPublisher", "DurablePublisher", "Mode", "PublisherState"]
