"""See, before a job is made, that the broker is there and what it is to send to exists."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from aio_pika.abc import AbstractConnection
from aiormq.exceptions import AMQPError

from relay.config.settings import BrokerSettings
from relay.errors import BrokerUnavailableError, UsageError
from relay.servers.rabbitmq import connection as broker


class Trace(StrEnum):
    """What a replayed message says of the trace in which its row was written."""

    KEEP = "keep"  # `traceparent` and `tracestate` as before: a consumer continues the trace
    LINK = "link"  # the header `x-link-traceparent`: a consumer begins a trace, and can link it to the first one
    DROP = "drop"  # nothing


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows go in place of where they went (None: there again), and what becomes of their trace."""

    exchange: str | None = None  # "" addresses a queue
    routing_key: str | None = None
    trace: Trace = Trace.LINK


SAME = Target()  # there again, and linked to its trace


async def check_target(settings: BrokerSettings, exchange: str | None, routing_key: str | None) -> None:
    """Connect, and ask for the exchange; for the default one, `""`, ask for the queue that the routing key names.

    Raises:
        BrokerUnavailableError: nothing lets us in.
        UsageError: it does not exist, or we may not ask for it.
    """
    connection = await broker.connect(settings, "relay replay")
    try:
        async with asyncio.timeout(settings.connect_timeout):
            await _ask(connection, exchange, routing_key)
    except AMQPError as error:
        words = " ".join(str(argument) for argument in error.args if argument is not None)
        raise UsageError(f"--to-exchange cannot be used: {words}") from error
    except TimeoutError:
        raise BrokerUnavailableError(f"no answer within {settings.connect_timeout:g} s") from None
    finally:
        await connection.hang_up()


async def _ask(connection: AbstractConnection, exchange: str | None, routing_key: str | None) -> None:
    if exchange is None:
        return
    channel = await connection.channel()
    if exchange:
        await channel.declare_exchange(exchange, passive=True)
    elif routing_key is not None:
        await channel.declare_queue(routing_key, passive=True)
