"""The exchange, the queue and the binding of the relay: a drill removes and declares each."""

from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel, AbstractQueue

EXCHANGE = "outbox"


class Topology:
    """The way from the relay to the queue, in pieces that can be taken away and put back."""

    def __init__(self, channel: AbstractChannel, queue: AbstractQueue) -> None:
        self._channel = channel
        self._queue = queue

    async def unbind(self) -> None:
        await self._queue.unbind(EXCHANGE, "#")

    async def bind(self) -> None:
        await self._queue.bind(EXCHANGE, "#")

    async def delete_exchange(self) -> None:
        await self._channel.exchange_delete(EXCHANGE)

    async def declare_exchange(self) -> None:
        await self._channel.declare_exchange(EXCHANGE, ExchangeType.TOPIC, durable=True)
        await self.bind()
