"""Publish copies of messages with publisher confirms."""

import asyncio
import struct
from weakref import WeakValueDictionary

from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError, ChannelInvalidStateError, DeliveryError, PublishError
from pamqp.commands import Basic

from relay.config.settings import BrokerSettings
from relay.consume.failed.envelope import folded
from relay.errors import BrokerUnavailableError
from relay.servers.rabbitmq.connection import Connection, connect, is_told_to_end, open_channel_within, words

UNSENDABLE = (TypeError, ValueError, OverflowError, struct.error)


class CopyRefusedError(Exception):
    """The broker does not have a copy, or did not confirm it; the message says why."""


class CopyPublisher:
    """Publishes copies, mandatory and confirmed, on a separate connection, which is opened at its first use.

    It is separate because an alarm of the broker blocks connections that publish, and acks must not wait for that.
    """

    def __init__(self, broker: BrokerSettings, name: str) -> None:
        self._broker = broker
        self._name = name
        self._connection: Connection | None = None
        self._channel: AbstractChannel | None = None
        self._opening = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def publish(self, queue: str, properties: Basic.Properties, body: bytes) -> None:
        """Send a copy to a queue, and return once the broker has it.

        Raises:
            CopyRefusedError: the broker does not have it, or whether it has is unknown.
        """
        # The library finds a returned message by its message_id. So two copies with one id must not be in flight.
        turn = self._turns.setdefault(properties.message_id or "", asyncio.Lock())
        async with turn:
            try:
                async with self._opening:
                    connection, channel = await self._open()
            except BrokerUnavailableError as error:
                raise CopyRefusedError(str(error)) from error
            try:
                await self._confirmed(connection, channel, queue=queue, properties=properties, body=body)
            except PublishError:
                raise CopyRefusedError(f"queue {queue} does not exist") from None
            except DeliveryError:
                raise CopyRefusedError(f"queue {queue} refused it (basic.nack): it is full, or has no quorum") from None
            except UNSENDABLE as error:  # by the library, before anything is sent
                raise CopyRefusedError(f"it cannot be encoded: {error}") from error
            except (AMQPError, ChannelInvalidStateError, OSError, asyncio.CancelledError) as error:
                # The library raises CancelledError, too, when the connection is lost meanwhile.
                await connection.hang_up()
                if is_told_to_end():
                    raise
                raise CopyRefusedError(f"no confirm, so it may have arrived: {words(error)}") from error

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.hang_up()

    async def _open(self) -> tuple[Connection, AbstractChannel]:
        """Return an open channel and its connection; raises BrokerUnavailableError."""
        if self._connection is not None and self._channel is not None:
            if not (self._connection.is_lost or self._channel.is_closed):
                return self._connection, self._channel
            await self._connection.hang_up()
        self._connection = await connect(self._broker, self._name, after=self._connection)
        try:
            self._channel = await open_channel_within(self._connection, self._broker.connect_timeout, confirms=True)
        except BrokerUnavailableError:
            await self._connection.hang_up()
            raise
        return self._connection, self._channel

    async def _confirmed(
        self, connection: Connection, channel: AbstractChannel, *, queue: str, properties: Basic.Properties, body: bytes
    ) -> None:
        fitting, content = folded(properties, body, channel.connection.connection_tune.frame_max)
        publishing = asyncio.ensure_future(
            channel.basic_publish(content, routing_key=queue, properties=fitting, mandatory=True)
        )
        try:
            # The broker stores a copy that was sent during an alarm when the alarm ends. If the consumer sent it again
            # meanwhile, the queue would have it twice.
            while not (await asyncio.wait([publishing], timeout=self._broker.confirm_timeout))[0]:
                if connection.blocked is None:
                    raise TimeoutError(f"no answer within {self._broker.confirm_timeout:g} s")
            await publishing
        finally:
            publishing.cancel()
