"""The queues next to the consumed one: retry queues, where messages wait for their next try, and the dead letters.

A pool has a queue for each partition in place of the consumed one. A consumer declares them at its start and never on a
reconnect (`relay.servers.rabbitmq.topology` says why), or the deployment declares them.
"""

from collections.abc import Iterable
from typing import TypeVar

from aiormq.abc import DeliveredMessage
from pydantic import ValidationError

from relay.config.settings import BrokerSettings
from relay.config.topology import Binding, Exchange, ExchangeType, Overflow, Queue
from relay.consume.apply.fence import PARTITION
from relay.consume.failed.envelope import DEAD_SUFFIX
from relay.errors import BrokerUnavailableError, ConfigurationError, QueueMissingError, QueueUnfitError
from relay.logger import get_logger
from relay.servers.rabbitmq.connection import Connection, connect
from relay.servers.rabbitmq.topology import Standing, declare

Thing = TypeVar("Thing", Exchange, Queue, Binding)

BY_LANE = {"x-match": "all-with-x"}  # "all" ignores headers that begin with x-
PARTITIONS = 16  # of a pool: the lanes of the relay

log = get_logger("relay.consume")

# Without it, a message on its way back is lost when its queue cannot take it. It needs reject-publish.
AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once"}


def dead_queue_name(queue: str) -> str:
    return f"{queue}{DEAD_SUFFIX}"


def partition_queue_name(queue: str, partition: int) -> str:
    return f"{queue}.{partition:02}"


def partition_queue_names(queue: str) -> list[str]:
    return [partition_queue_name(queue, partition) for partition in range(PARTITIONS)]


def came_from(letter: DeliveredMessage, queue: str) -> str:
    """Return the name of the queue from which a dead letter came: a pool has one for each partition."""
    headers = letter.header.properties.headers or {}
    partition, deaths = headers.get(PARTITION), headers.get("x-death")
    if type(partition) is int and 0 <= partition < PARTITIONS:
        return partition_queue_name(queue, partition)
    last = deaths[0].get("queue") if deaths and isinstance(deaths, list) and isinstance(deaths[0], dict) else None
    return last if isinstance(last, str) and last in partition_queue_names(queue) else queue


def retry_queue_name(queue: str, step: float) -> str:
    """Return the name of the retry queue of a step, which has the step's milliseconds.

    A queue's arguments cannot be changed, so other settings need other queues. Messages in old queues still come back.
    """
    return f"{queue}.retry.{round(step * 1000)}"


def dead_queue(queue: str) -> Queue:
    return _queue(dead_queue_name(queue), overflow=Overflow.REJECT_PUBLISH)


def retry_queues(queue: str, steps: Iterable[float]) -> list[Queue]:
    return [
        _queue(
            retry_queue_name(queue, step),
            message_ttl=step,
            dead_letter_exchange="",
            dead_letter_routing_key=queue,
            overflow=Overflow.REJECT_PUBLISH,
            arguments=AT_LEAST_ONCE,
        )
        for step in steps
    ]


def pool_topology(queue: str) -> list[Exchange | Queue | Binding]:
    """Return the exchanges, queues and bindings of a pool.

    The operator binds its exchange `<queue>.partitions` to the exchange of the events. The broker routes a message to
    the queue of its partition by the header in which the relay writes the lane. A message without that header goes to
    the dead letters. A partition keeps its queue, whichever member consumes it. So the messages that a dead member had
    in flight stay in that queue.
    """
    dead, exchange, astray = dead_queue_name(queue), f"{queue}.partitions", f"{queue}.unpartitioned"
    partitions = [
        _queue(
            name,
            single_active_consumer=True,
            dead_letter_exchange="",
            dead_letter_routing_key=dead,
            overflow=Overflow.REJECT_PUBLISH,
            arguments=AT_LEAST_ONCE,
        )
        for name in partition_queue_names(queue)
    ]
    return [
        dead_queue(queue),
        _listed(Exchange, name=astray, type=ExchangeType.FANOUT),
        _listed(Binding, exchange=astray, queue=dead),
        _listed(Exchange, name=exchange, type=ExchangeType.HEADERS, alternate_exchange=astray),
        *partitions,
        *(
            _listed(Binding, exchange=exchange, queue=each.name, arguments={**BY_LANE, "x-outbox-lane": lane})
            for lane, each in enumerate(partitions)
        ),
    ]


async def prepare(
    broker: BrokerSettings,
    consumer_name: str,
    beside: Iterable[Exchange | Queue | Binding],
    *,
    consumed: str | None = None,
    may_declare: bool,
) -> None:
    """Check that the consumed queue and those next to it exist; with `may_declare`, declare what is missing next to it.

    A dead-letter queue is taken as it is. With `may_declare`, the others must have the expected arguments.

    Raises:
        QueueMissingError: the consumed queue does not exist.
        QueueUnfitError: a queue or exchange next to it is missing, or has other arguments. The error names it and its
            arguments, and says what to do.
        BrokerUnavailableError: no connection, or it was lost.
    """
    connection = await connect(broker, f"outbox-consumer {consumer_name} queues")
    try:
        if consumed is not None:
            told = await declare(connection, Queue.model_construct(name=consumed), compare=False, dry_run=True)
            if told.standing is Standing.MISSING:
                raise QueueMissingError(consumed)
        for thing in beside:
            await _see_to(connection, thing, may_declare=may_declare)
    except OSError as error:
        raise BrokerUnavailableError(str(error)) from error
    finally:
        await connection.hang_up()


async def _see_to(connection: Connection, thing: Exchange | Queue | Binding, *, may_declare: bool) -> None:
    if isinstance(thing, Binding) and not may_declare:
        return  # a client cannot ask whether a binding exists
    is_ours = not isinstance(thing, Queue) or thing.dead_letter_exchange is not None
    told = await declare(connection, thing, compare=is_ours and may_declare, dry_run=not may_declare)
    if told.standing in (Standing.MISSING, Standing.DIFFERS, Standing.FAILED):
        arguments = thing.arguments if isinstance(thing, Binding) else thing.amqp_arguments()
        raise QueueUnfitError(told.kind, told.name, told.words, arguments)
    if told.standing is Standing.DECLARED:
        log.info("topology.declared", kind=told.kind, name=told.name)


def _queue(name: str, **settings: object) -> Queue:
    return _listed(Queue, name=name, **settings)


def _listed(kind: type[Thing], **settings: object) -> Thing:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        faults = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors())
        raise ConfigurationError(
            f"{kind.__name__.lower()} {settings.get('name')!r} cannot be declared: {faults}"
        ) from None
