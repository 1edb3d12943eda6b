"""The queues next to the one that is consumed: where messages wait for their next try, and where the dead letters go.

And what a pool has in place of that one: a queue for each partition. Declared at the start of a consumer and never on a
reconnect (`relay.servers.rabbitmq.topology` says why), or at the deployment.
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
from relay.servers.rabbitmq.connection import Connection, connect, public_reason
from relay.servers.rabbitmq.topology import Standing, declare

Thing = TypeVar("Thing", Exchange, Queue, Binding)

BY_LANE = {"x-match": "all-with-x"}  # "all" passes over headers that begin with x-
PARTITIONS = 16  # of a pool: the lanes of the relay

log = get_logger("relay.consume")

# Without it a message that is on its way back is gone when its queue cannot take it. It needs reject-publish.
AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once"}


def dead_queue_name(queue: str) -> str:
    return f"{queue}{DEAD_SUFFIX}"


def partition_queue_name(queue: str, partition: int) -> str:
    return f"{queue}.{partition:02}"


def partition_queue_names(queue: str) -> list[str]:
    return [partition_queue_name(queue, partition) for partition in range(PARTITIONS)]


def came_from(letter: DeliveredMessage, queue: str) -> str:
    """Name the queue from which a dead letter of a consumed queue came: a pool has one for each partition."""
    headers = letter.header.properties.headers or {}
    partition, deaths = headers.get(PARTITION), headers.get("x-death")
    if type(partition) is int and 0 <= partition < PARTITIONS:
        return partition_queue_name(queue, partition)
    last = deaths[0].get("queue") if deaths and isinstance(deaths, list) and isinstance(deaths[0], dict) else None
    return last if isinstance(last, str) and last in partition_queue_names(queue) else queue


def retry_queue_name(queue: str, step: float) -> str:
    """Name the retry queue of a step by its milliseconds. A queue's arguments cannot be changed, so other settings need
    other queues, and what is in the old ones still comes back.
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
    """Return what a pool has at the broker.

    Bind its exchange to where the events come from. It hands each message to the queue of its partition, by the header
    in which the relay names the lane. What has no such header goes to the dead letters. The queue of a partition stays
    where it is, whichever member consumes it: so do the messages that a dead member had in hand.
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
    """Check that the consumed queue is there, and what belongs to it; declare what is missing of that when we may.

    A dead-letter queue is taken as it is; the others must have their arguments, if the user may ask for them.

    Raises:
        QueueMissingError: there is nothing to consume.
        QueueUnfitError: a queue or exchange next to it is missing, or has other arguments; it names it, its arguments
            and what to do.
        BrokerUnavailableError: no connection, or it was lost.
    """
    connection = await connect(broker, f"outbox-consumer {consumer_name} queues")
    try:
        if consumed is not None:
            declared = await declare(connection, Queue.model_construct(name=consumed), compare=False, dry_run=True)
            if declared.standing is Standing.MISSING:
                raise QueueMissingError(consumed)
        for thing in beside:
            await _see_to(connection, thing, may_declare=may_declare)
    except OSError as error:
        raise BrokerUnavailableError(str(error), public=public_reason(error)) from error
    finally:
        await connection.hang_up()


async def _see_to(connection: Connection, thing: Exchange | Queue | Binding, *, may_declare: bool) -> None:
    if isinstance(thing, Binding) and not may_declare:
        return  # nobody can see whether it is there
    is_ours = not isinstance(thing, Queue) or thing.dead_letter_exchange is not None
    declared = await declare(connection, thing, compare=is_ours and may_declare, dry_run=not may_declare)
    if declared.standing in (Standing.MISSING, Standing.DIFFERS, Standing.FAILED):
        arguments = thing.arguments if isinstance(thing, Binding) else thing.amqp_arguments()
        raise QueueUnfitError(declared.kind, declared.name, declared.words, arguments)
    if declared.standing is Standing.DECLARED:
        log.info("topology.declared", kind=declared.kind, name=declared.name)


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
