"""Declare the exchanges, queues and bindings of `[topology]`.

What is missing is declared, what exists is compared, and nothing is ever changed. This happens only at a start or by
command, never at a reconnect. After a network split, a node of RabbitMQ 3.x may be separate from the others without any
sign. A queue that is declared through it takes confirmed messages, and is lost with them when the node restarts.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from aiormq.abc import AbstractChannel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from relay.config.settings import BrokerSettings
from relay.config.topology import Binding, Exchange, Queue, TopologySettings
from relay.errors import BrokerUnavailableError
from relay.servers.rabbitmq.connection import (
    Connection,
    answer_within,
    close_channel,
    connect,
    is_told_to_end,
    open_channel,
    words,
)

DECLARE_TIMEOUT = 10.0  # seconds; the broker answers when the members of a quorum queue have started

SEE_LOG = "see the broker's log, then run `relay topology apply`"
AS_IT_IS = {
    Exchange: "list it as it is, or delete it and run `relay topology apply`",
    Queue: "list it as it is, or delete it with its messages and run `relay topology apply`",
}
REMEDIES: dict[type[ChannelClosed], str] = {
    ChannelAccessRefused: "give the user the permissions that docs/topology.md names (rabbitmqctl set_permissions)",
    ChannelNotFoundEntity: "list what is missing in relay.toml, too, or create it",
    ChannelLockedResource: "list it by another name: one connection has it for itself (exclusive)",
    ChannelPreconditionFailed: "change it in relay.toml: the broker takes it from no user",
}

Thing = Exchange | Queue | Binding


class Standing(StrEnum):
    """The state of a listed exchange, queue or binding at the broker."""

    DECLARED = "declared"  # it was missing, and exists now
    THERE = "there"  # it existed, as it is listed
    BOUND = "bound"  # the binding exists now; AMQP does not show whether it existed before
    MISSING = "missing"  # it would be declared (dry run)
    UNSEEN = "unseen"  # both ends of a binding exist; AMQP does not show whether the binding does (dry run)
    DIFFERS = "differs"  # it exists, but not as it is listed
    FAILED = "failed"  # it could not be declared or compared


BAD = (Standing.DIFFERS, Standing.FAILED)


@dataclass(frozen=True, slots=True)
class Declared:
    """The result for one listed exchange, queue or binding."""

    kind: str  # exchange, queue, binding
    name: str
    standing: Standing
    words: str = ""  # the broker's text
    remedy: str = ""


def listed(topology: TopologySettings) -> list[Thing]:
    """Return everything that is listed, in the order in which it must be declared."""
    return [*topology.exchanges, *topology.queues, *topology.bindings]


def default_exchange(broker: BrokerSettings, things: Sequence[Thing]) -> Exchange | None:
    """Return the exchange that a relay declares although it is not listed.

    It may be of any type, so it must not be compared.
    """
    is_listed = any(isinstance(thing, Exchange) and thing.name == broker.exchange for thing in things)
    # Made without validation: the relay can publish to an exchange whose name cannot be declared.
    return Exchange.model_construct(name=broker.exchange) if broker.exchange and not is_listed else None


def kind_of(thing: Thing) -> str:
    """Return `exchange`, `queue` or `binding`."""
    return type(thing).__name__.lower()


def name_of(thing: Thing) -> str:
    """Return its name; for a binding `exchange -> queue (routing key)`."""
    if not isinstance(thing, Binding):
        return thing.name
    key = f" ({thing.routing_key})" if thing.routing_key else ""
    return f"{thing.exchange} -> {thing.queue or thing.to_exchange}{key}"


async def apply(broker: BrokerSettings, topology: TopologySettings, *, dry_run: bool = False) -> list[Declared]:
    """Declare what is listed, and the default exchange if it is bound. After a failure it goes on with the rest.

    Args:
        dry_run: report what is missing, and declare nothing.
    Raises:
        BrokerUnavailableError: there was no connection at all.
    """
    results: list[Declared] = []
    things = listed(topology)
    bound_to = {thing.exchange for thing in things if isinstance(thing, Binding)}
    default = default_exchange(broker, things)
    if default is not None and default.name in bound_to:
        things.insert(0, default)
    connection, lost = None, None
    try:
        for thing in things:
            if connection is None:
                try:
                    connection = await connect(broker, "relay topology", after=lost)
                except BrokerUnavailableError as error:
                    if not results:
                        raise
                    return results + [failed(each, error) for each in things[len(results) :]]
            to_come = {(each.kind, each.name) for each in results if each.standing is Standing.MISSING}
            try:
                compare = thing is not default
                results.append(await declare(connection, thing, compare=compare, dry_run=dry_run, to_come=to_come))
            except OSError as error:
                results.append(failed(thing, error))
                await connection.hang_up()
                connection, lost = None, connection
    finally:
        if connection is not None:
            await connection.hang_up()
    return results


async def declare(
    connection: Connection,
    thing: Thing,
    *,
    compare: bool = True,
    dry_run: bool = False,
    to_come: Collection[tuple[str, str]] = (),
) -> Declared:
    """Declare one thing if it is missing, else compare it with what exists. A refusal by the broker is a result.

    Args:
        compare: if false, an existing one is taken as it is.
        to_come: for a dry run, kinds and names of the missing things that would be declared before this.
    Raises:
        TimeoutError: no answer.
        ConnectionError: the connection was lost: by a fault, or because the broker closes it for such a declaration.
    """
    try:
        async with answer_within(f"declare {name_of(thing)}", DECLARE_TIMEOUT):
            if isinstance(thing, Binding):
                return await (_look(connection, thing, to_come) if dry_run else _bind(connection, thing))
            return await _declare(connection, thing, compare=compare, dry_run=dry_run)
    except TimeoutError:
        raise
    except ChannelClosed as error:
        return _told(thing, Standing.FAILED, words(error), REMEDIES.get(type(error), SEE_LOG))
    except ValueError as error:  # raised by the AMQP library
        return _told(thing, Standing.FAILED, words(error), "declare it with another client, or choose another name")
    # Also CancelledError without a cancellation: the library raises it when the connection is lost.
    except (AMQPError, OSError, RuntimeError, asyncio.CancelledError) as error:
        if is_told_to_end():
            raise
        raise ConnectionError(f"connection lost: {words(connection.end or error)}") from error


def failed(thing: Thing, error: Exception) -> Declared:
    """Return the result FAILED for a thing that was not declared."""
    return _told(thing, Standing.FAILED, words(error), SEE_LOG)


async def _declare(connection: Connection, thing: Exchange | Queue, *, compare: bool, dry_run: bool) -> Declared:
    is_there = await _is_there(connection, thing)
    if is_there and not compare:
        return _told(thing, Standing.THERE)
    if not is_there and dry_run:
        return _told(thing, Standing.MISSING)
    try:
        # Declaring an existing thing compares it and leaves it as it is; AMQP has no other way to compare. If another
        # client deletes it between the two calls, this declares it again, also in a dry run.
        async with _channel(connection) as channel:
            if isinstance(thing, Exchange):
                await channel.exchange_declare(
                    thing.name, exchange_type=thing.type, durable=thing.durable, arguments=thing.amqp_arguments()
                )
            else:
                await channel.queue_declare(thing.name, durable=thing.durable, arguments=thing.amqp_arguments())
    except ChannelPreconditionFailed as error:
        if not is_there:
            raise
        return _told(thing, Standing.DIFFERS, words(error), AS_IT_IS[type(thing)])
    return _told(thing, Standing.THERE if is_there else Standing.DECLARED)


async def _is_there(connection: Connection, thing: Exchange | Queue) -> bool:
    try:
        async with _channel(connection) as channel:
            if isinstance(thing, Exchange):
                await channel.exchange_declare(thing.name, passive=True)
            else:
                await channel.queue_declare(thing.name, passive=True)
    except ChannelNotFoundEntity:
        return False
    return True


async def _bind(connection: Connection, binding: Binding) -> Declared:
    async with _channel(connection) as channel:
        if binding.queue is not None:
            await channel.queue_bind(binding.queue, binding.exchange, binding.routing_key, arguments=binding.arguments)
        else:
            await channel.exchange_bind(
                destination=str(binding.to_exchange),
                source=binding.exchange,
                routing_key=binding.routing_key,
                arguments=binding.arguments,
            )
    return _told(binding, Standing.BOUND)


async def _look(connection: Connection, binding: Binding, to_come: Collection[tuple[str, str]]) -> Declared:
    """Return the result of a dry run for a binding: whether it could be made."""
    to = Exchange(name=binding.to_exchange) if binding.to_exchange else Queue(name=str(binding.queue))
    ends = (Exchange.model_construct(name=binding.exchange), to)
    missing = [end for end in ends if not await _is_there(connection, end)]
    for end in missing:
        if (kind_of(end), end.name) not in to_come:
            seen = f"{kind_of(end)} {end.name!r} does not exist and is not listed"
            return _told(binding, Standing.FAILED, seen, REMEDIES[ChannelNotFoundEntity])
    return _told(binding, Standing.MISSING if missing else Standing.UNSEEN)


@asynccontextmanager
async def _channel(connection: Connection) -> AsyncIterator[AbstractChannel]:
    """Open a channel for one request: the broker closes the channel when it refuses the request."""
    channel = await open_channel(connection)
    yield channel
    await close_channel(channel)


def _told(thing: Thing, standing: Standing, seen: str = "", remedy: str = "") -> Declared:
    return Declared(kind_of(thing), name_of(thing), standing, seen, remedy)
