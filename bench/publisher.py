"""How fast the durable publisher takes events: `python -m bench.publisher`, next to the AMQP library's own publish.

Callers publish one event after the other, each when its last one is accepted: 1, 100 or 1,000 of them, each with a
key. Four sides take turns: the durable publisher on the direct way; aio-pika's `exchange.publish` with confirms; the
durable publisher without a broker, into table and file. See docs/benchmarks.md.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path

import aio_pika
import structlog
from pydantic import SecretStr

from bench.frame.error import BenchmarkError
from bench.frame.queue import EXCHANGE, depth, purge
from bench.frame.run import Bench, Column, Count, Figures, Positive, main
from bench.frame.servers import Servers, private_servers
from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.outbox import Event
from relay.publisher import DurablePublisher

PAYLOAD = '{"invoice": "' + "x" * 497 + '"}'  # 512 bytes
IN_FLIGHT = (1, 100, 1000)
NOWHERE = "amqp://127.0.0.1:1/"
DIRECT, LIBRARY, TABLE, FILE = "durable publisher", "aio-pika", "without a broker: table", "without a broker: file"

Publish = Callable[[str], Awaitable[object]]
Way = Callable[[Servers, int, float], Coroutine[None, None, float]]


def measure(*, rounds: Count = 3, seconds: Positive = 4.0, run: Bench) -> None:
    """Measure the durable publisher.

    Parameters
    ----------
    rounds
        Rounds of all sides.
    seconds
        How long each side publishes.
    """
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    ratio = Column("of aio-pika", "rate", 2, is_ratio=True)
    accepted = run.table("Events accepted a second", Column("a second", "rate"), ratio)
    ways = {LIBRARY: _library, DIRECT: _direct, TABLE: _table, FILE: _file}
    with private_servers(run, routing_key="invoice.InvoiceIssued") as servers:
        for callers in IN_FLIGHT:
            sides = {
                f"{callers:,} callers, {name}": partial(_measure, way, servers, callers, seconds)
                for name, way in ways.items()
            }
            accepted.measure(sides, rounds)


def _measure(way: Way, servers: Servers, callers: int, seconds: float) -> Figures:
    rate = asyncio.run(way(servers, callers, seconds))
    purge(servers.broker_url)
    return {"rate": rate}


async def _direct(servers: Servers, in_flight: int, seconds: float) -> float:
    broker = BrokerSettings(url=SecretStr(servers.broker_url))
    async with DurablePublisher(_database(servers), broker=broker, name=DIRECT) as publisher:
        rate = await _rate(lambda key: publisher.publish(_event(key)), in_flight, seconds)
        arrived = await asyncio.to_thread(depth, servers.broker_url)
        if publisher.state.buffered or publisher.state.confirmed != arrived:
            raise BenchmarkError(f"{publisher.state} and {arrived} in the queue: not all went the direct way")
    return rate


async def _library(servers: Servers, in_flight: int, seconds: float) -> float:
    async with await aio_pika.connect(servers.broker_url) as connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        exchange = await channel.get_exchange(EXCHANGE)

        async def publish(key: str) -> None:
            event = _event(key)
            message = aio_pika.Message(
                PAYLOAD.encode(),
                message_id=str(event.message_id),
                type=event.event_type,
                content_type="application/json",
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                headers={"x-aggregate-type": event.aggregate_type, "x-aggregate-id": key},
            )
            await exchange.publish(message, "invoice.InvoiceIssued", mandatory=True)

        return await _rate(publish, in_flight, seconds)


async def _table(servers: Servers, in_flight: int, seconds: float) -> float:
    return await _buffered(_database(servers), in_flight, seconds)


async def _file(servers: Servers, in_flight: int, seconds: float) -> float:
    return await _buffered(servers.folder / f"{time.monotonic_ns()}.sqlite", in_flight, seconds)


async def _buffered(place: DatabaseSettings | Path, in_flight: int, seconds: float) -> float:
    # A separate name for each: what an earlier case has left in the table is not this one's.
    name = f"bench {time.monotonic_ns()}"
    async with DurablePublisher(place, broker=BrokerSettings(url=SecretStr(NOWHERE)), name=name) as publisher:
        return await _rate(lambda key: publisher.publish(_event(key)), in_flight, seconds)


async def _rate(publish: Publish, callers: int, seconds: float) -> float:
    """Return the events accepted a second, after half a second to warm up."""
    accepted = 0
    began = time.perf_counter() + 0.5
    end = began + seconds

    async def call(key: str) -> None:
        nonlocal accepted
        while (now := time.perf_counter()) < end:
            await publish(key)
            accepted += now >= began

    await asyncio.gather(*(call(str(n)) for n in range(callers)))
    return accepted / (time.perf_counter() - began)


def _event(key: str) -> Event:
    return Event("invoice", key, "InvoiceIssued", PAYLOAD)


def _database(servers: Servers) -> DatabaseSettings:
    return DatabaseSettings(url=SecretStr(servers.database_url))


if __name__ == "__main__":
    main(measure)
