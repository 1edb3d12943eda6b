"""The connection of a member, on which each of its partitions has a channel."""

import asyncio

from aiormq.abc import AbstractChannel

from relay.config.settings import BrokerSettings
from relay.consume.queue_depth import ready_count
from relay.errors import BrokerUnavailableError
from relay.runtime.health import Health
from relay.servers.rabbitmq.connection import Connection, connect, open_channel_within


class MemberConnection:
    """Opened at its first use, and again after a loss."""

    def __init__(self, broker: BrokerSettings, name: str, health: Health) -> None:
        self._health = health
        self._broker = broker
        self._name = name
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()

    @property
    def hindrance(self) -> str | None:
        """Return why no message goes through; None: no fault is known."""
        if reason := self._health.hindrances.get("broker"):
            return reason
        if self._connection is None:
            return "not connected yet"
        return self._connection.loss or self._connection.hindrance

    async def channel(self) -> AbstractChannel:
        """Return an open channel; raises BrokerUnavailableError."""
        async with self._opening:
            connection = self._connection
            # Reported once. Reported again after a refusal, the time for which the broker refuses would start again.
            if connection is not None and connection.loss is not None and not self._health.degraded_for("broker"):
                self._health.degrade("broker", connection.loss)
            if connection is None or connection.is_lost:
                connection = self._connection = await self._open(connection)
        return await open_channel_within(connection, self._broker.connect_timeout)

    async def _open(self, lost: Connection | None) -> Connection:
        try:
            connection = await connect(self._broker, self._name, after=lost)
        except BrokerUnavailableError as error:
            self._health.degrade("broker", str(error), is_refusal=error.is_refusal)
            raise
        self._health.heal("broker")
        return connection

    async def ready_count(self, queue: str) -> int | None:
        """Return how many messages wait in a queue, without those in flight; None if unknown."""
        if self._connection is None or self._connection.is_lost:
            return None
        return await ready_count(self._connection, queue, self._broker.connect_timeout)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.hang_up()
