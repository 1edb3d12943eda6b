"""Publish copies of messages, and know that the broker has them."""

import asyncio
import struct
from weakref import WeakValueDictionary

from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError, ChannelInvalidStateError, DeliveryError, PublishError
from pamqp.commands import Basic

from relay.broker.connection import Connection, connect, is_told_to_end, words
from relay.config.settings import BrokerSettings
from relay.consume.failed.envelope import folded
from relay.errors import BrokerUnavailableError

UNSENDABLE = (TypeError, ValueError, OverflowError, struct.error)


class Outgoing:
    """Mandatory and confirmed, on a connection of its own, which is opened when it is needed.

    Of its own, because an alarm of the broker stops whoever publishes: our acks must not wait behind that.
    """

    def __init__(self, broker: BrokerSettings, name: str) -> None:
        self._broker = broker
        self._name = name
        self._connection: Connection | None = None
        self._channel: AbstractChannel | None = None
        self._opening = asyncio.Lock()
        self._key_queue: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def publish(self, queue: str, properties: Basic.Properties, body: bytes) -> str | None:
        """Send to a queue; None: the broker has it. Else the words say why not, or that nobody knows."""
        # The library finds a returned message by its message_id: no two of one are on their way together.
        turn = self._key_queue.setdefault(properties.message_id or "", asyncio.Lock())
        async with turn:
            try:
                async with self._opening:
                    connection, channel = await self._open()
            except BrokerUnavailableError as error:
                return str(error)
            try:
                await self._confirmed(connection, channel, queue, properties, body)
            except PublishError:
                return f"queue {queue} does not exist"
            except DeliveryError:
                return f"queue {queue} refused it (basic.nack): it is full, or has no quorum"
            except UNSENDABLE as error:  # by the library, before anything is sent
                return f"it cannot be encoded: {error}"
            except (AMQPError, ChannelInvalidStateError, OSError, asyncio.CancelledError) as error:
                # The library raises CancelledError, too, when the connection goes away under it.
                await connection.hang_up()
                if is_told_to_end():
                    raise
                return f"no confirm, so it may have arrived: {words(error)}"
            return None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.hang_up()

    async def _open(self) -> tuple[Connection, AbstractChannel]:
        """Give a channel that is open; raises BrokerUnavailableError."""
        if self._connection is not None and self._channel is not None:
            if not (self._connection.is_lost or self._channel.is_closed):
                return self._connection, self._channel
            await self._connection.hang_up()
        self._connection = await connect(self._broker, self._name)
        try:
            async with asyncio.timeout(self._broker.connect_timeout):
                opened = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
                self._channel = await opened.get_underlay_channel()
        except (AMQPError, OSError) as error:
            await self._connection.hang_up()
            raise BrokerUnavailableError(f"no channel: {words(error)}") from error
        return self._connection, self._channel

    async def _confirmed(
        self, connection: Connection, channel: AbstractChannel, queue: str, properties: Basic.Properties, body: bytes
    ) -> None:
        fitting, content = folded(properties, body, channel.connection.connection_tune.frame_max)
        publishing = asyncio.ensure_future(
            channel.basic_publish(content, routing_key=queue, properties=fitting, mandatory=True)
        )
        try:
            # What is sent during an alarm is stored at its end: sent again meanwhile, it would be there twice.
            while not (await asyncio.wait([publishing], timeout=self._broker.confirm_timeout))[0]:
                if connection.blocked is None:
                    raise TimeoutError(f"no answer within {self._broker.confirm_timeout:g} s")
            await publishing
        finally:
            publishing.cancel()
