"""Consumers that a short `consumer_timeout` of the broker meets, and a handler that does not end in time."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from relay.consume import Message, WorkPolicy, on
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import count
from tests.consume.policies import QUICK

TIMEOUT = 2000  # milliseconds; the lowest that leaves a busy machine time to apply a message
LOOK = 300  # milliseconds between two looks of a channel at its deliveries, up to RabbitMQ 4.2
WORK = WorkPolicy(concurrency=1, drain_timeout=0.2, backoff=QUICK)


@contextmanager
def short_timeout(rabbitmq: RabbitServer) -> Iterator[None]:
    """Shorten the time-out of channels that are opened from now on: a queue of RabbitMQ 3.10 has no setting for it."""
    set_keys(rabbitmq, consumer_timeout=TIMEOUT, channel_tick_interval=LOOK)
    try:
        yield
    finally:
        set_keys(rabbitmq, consumer_timeout=1_800_000, channel_tick_interval=60_000)


def set_keys(rabbitmq: RabbitServer, **milliseconds: int) -> None:
    for key, value in milliseconds.items():
        rabbitmq.call(f"application:set_env(rabbit, {key}, {value}).")


class Hanging:
    """A handler whose first calls do not end.

    Attributes:
        headers: those of each message that it was called with.
    """

    def __init__(self, calls: int = 1) -> None:
        self.headers: list[dict[str, Any]] = []

        @on("Counted")
        async def handle(message: Message, connection: psycopg.AsyncConnection) -> None:
            self.headers.append(dict(message.headers))
            if len(self.headers) <= calls:
                await asyncio.Event().wait()
            await count(message, connection)

        self.handle = handle
