"""Where messages go at the broker, as far as the settings and the pools tell: exchange, routing key, queue, consumers.

AMQP does not list bindings. What relay.toml does not list is not here; a queue that it lists is asked for its depth and
its consumers by a passive declare.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from aiormq.exceptions import AMQPError, ChannelNotFoundEntity

from relay.config.settings import Settings
from relay.config.topology import Binding
from relay.consume.failed.queues import pool_topology
from relay.consume.pool.tables import read_pools
from relay.consume.queue_depth import ask_queue
from relay.engine.send.routes import DEFAULT_ROUTING_KEY
from relay.errors import BrokerUnavailableError, ConfigurationError, OutboxError
from relay.runtime.scrub import scrub
from relay.servers.postgres.bounded_values import bound_values
from relay.servers.postgres.database import connect_async
from relay.servers.rabbitmq.connection import Connection, connect, words

NOT_LISTED = "relay.toml lists no binding of this exchange"
NOT_THERE = "the queue is not there"


@dataclass(frozen=True, slots=True)
class Way:
    """One step of a message: from an exchange, by a routing key, to a queue or to another exchange.

    Attributes:
        words: why `ready` and `consumers` are not known; empty where they are, or where there is no queue to ask.
    """

    exchange: str
    routing_key: str
    queue: str | None = None
    to_exchange: str | None = None
    ready: int | None = None
    consumers: int | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class RouteMap:
    """All ways, as of one moment; `error` says which server did not answer."""

    at: datetime
    ways: list[Way]
    error: str = ""

    @property
    def age(self) -> float:
        """How many seconds ago it was."""
        return (datetime.now(UTC) - self.at).total_seconds()


async def read_route_map(settings: Settings) -> RouteMap:
    """Return the ways with what waits in each queue; a server that does not answer is told in `error`."""
    errors: list[str] = []
    in_pools: list[Way] = []
    try:
        async with await connect_async(settings.database, application_name="relay console") as database:
            bound_values(database)
            for pool in await read_pools(database, settings.database.schema_name):
                try:
                    in_pools += _pool_ways(pool.queue)
                except ConfigurationError as error:  # a member has written a name that no queue can have
                    errors.append(f"pool {pool.name}: {error}")
    except OutboxError as error:
        errors.append(str(error))
    ways = [*listed_ways(settings), *in_pools]
    try:
        connection = await connect(settings.broker, "relay console")
    except BrokerUnavailableError as error:
        errors.append(str(error))
    else:
        try:
            ways = [await _seen(connection, way, settings.broker.connect_timeout) for way in ways]
        finally:
            await connection.hang_up()
    return RouteMap(datetime.now(UTC), ways, scrub("; ".join(errors)))


def listed_ways(settings: Settings) -> list[Way]:
    """Return the ways that the settings tell: the bindings, and then the addresses of rows that no binding has."""
    topology = settings.topology
    ways = [_of_binding(binding) for binding in topology.bindings]
    bound = {way.exchange for way in ways}
    addresses = [(route.exchange, route.routing_key) for route in settings.routes]
    for exchange, key in dict.fromkeys([*addresses, (settings.broker.exchange, DEFAULT_ROUTING_KEY)]):
        if not exchange:
            ways.append(Way(exchange, key, queue=None if "{" in key else key))
        elif exchange not in bound:
            ways.append(Way(exchange, key, words=NOT_LISTED))
    reached = {way.queue for way in ways}
    ways += [Way("", queue.name, queue=queue.name) for queue in topology.queues if queue.name not in reached]
    return ways


def _pool_ways(queue: str) -> Iterator[Way]:
    for each in pool_topology(queue):
        if isinstance(each, Binding):
            lane = each.arguments.get("x-outbox-lane")
            way = _of_binding(each)
            yield way if lane is None else replace(way, routing_key=f"lane {lane}")


def _of_binding(binding: Binding) -> Way:
    return Way(binding.exchange, binding.routing_key, queue=binding.queue, to_exchange=binding.to_exchange)


async def _seen(connection: Connection, way: Way, within: float) -> Way:
    if way.queue is None:
        return way
    try:
        depth = await ask_queue(connection, way.queue, within)
    except ChannelNotFoundEntity:
        return replace(way, words=NOT_THERE)
    except (AMQPError, OSError, RuntimeError, ValueError) as error:
        return replace(way, words=words(error))
    return replace(way, ready=depth.ready, consumers=depth.consumers)
