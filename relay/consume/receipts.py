"""Acknowledge to the broker what is settled, with few frames."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from math import inf

from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError, ChannelInvalidStateError

from relay.consume.counters import Counters


class Receipts:
    """The deliveries of one channel that are not acknowledged yet.

    An ack that is lost with the connection is no error: the message comes again and the inbox knows it.
    """

    def __init__(self, channel: AbstractChannel, counters: Counters) -> None:
        self._channel = channel
        self._counters = counters
        self._open: dict[int, None] = {}  # in the order of the tags, as they came in
        self._settled: list[int] = []
        self._some = asyncio.Event()

    def expect(self, tag: int) -> None:
        self._open[tag] = None
        self._counters.unacknowledged = len(self._open)

    def settle(self, tags: Iterable[int]) -> None:
        """Have these acknowledged soon."""
        self._settled.extend(tags)
        self._some.set()

    async def send(self) -> None:
        """Acknowledge until cancelled, or the channel is gone."""
        while not self._channel.is_closed:
            await self._some.wait()
            await self.flush()

    async def flush(self) -> None:
        """Acknowledge what is settled by now."""
        with suppress(ChannelInvalidStateError, AMQPError):  # gone: see above
            await self._flush()

    def give_back(self) -> None:
        """The channel ends: the broker takes back what is still open."""
        self._counters.given_back += len(self._open)
        self._counters.unacknowledged = 0

    async def _flush(self) -> None:
        self._some.clear()
        tags, self._settled = sorted(self._settled), []
        for tag in tags:
            del self._open[tag]
        self._counters.acknowledged += len(tags)
        self._counters.unacknowledged = len(self._open)
        # One frame for all up to the first that is still open: for a quorum queue each ack is a log entry.
        first_open = next(iter(self._open), inf)
        below = [tag for tag in tags if tag < first_open]
        if below:
            await self._channel.basic_ack(below[-1], multiple=True, wait=False)
        for tag in tags[len(below) :]:
            await self._channel.basic_ack(tag, wait=False)
