"""The queues that relay.toml lists: on every host, as listed, and with an end to what they keep.

A policy of the broker may add to what is listed, and AMQP does not tell: where it matters the line says how to ask.
"""

from collections.abc import AsyncIterator, Iterator, Sequence

from aiormq.abc import AbstractChannel

from relay.config.settings import Settings
from relay.config.topology import Overflow, Queue, QueueType
from relay.operate.doctor.broker_hosts import OpenHost
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.presence import absence, ask_each, odd_one, on_every
from relay.operate.doctor.question import NO_LOCATOR, Answer, is_queue, queue_like

ASK_POLICY = "`rabbitmqctl list_queues name effective_policy_definition` tells what a policy adds"


def addressed_queues(settings: Settings) -> list[str]:
    """Return the queues that routes address by the default exchange, as far as their names are written out."""
    named = (route.routing_key for route in settings.routes if not route.exchange)
    return list(dict.fromkeys(name for name in named if "{" not in name))


async def queues_are_there(hosts: Sequence[OpenHost], settings: Settings) -> AsyncIterator[Finding]:
    """See that each queue is on every host, and is as it is listed."""
    check = "broker.queue"
    listed = {each.name: each for each in settings.topology.queues}
    for name in dict.fromkeys([*addressed_queues(settings), *listed]):
        at_start = settings.broker.declare and name in listed
        declaration = queue_like(name, durable=True, arguments={}) if at_start else None
        missing = await absence(check, f"queue {name}", hosts, is_queue(name), declaration=declaration)
        yield missing or await _as_it_is(check, name, listed.get(name), hosts)


async def _as_it_is(check: str, name: str, listed: Queue | None, hosts: Sequence[OpenHost]) -> Finding:
    thing = f"queue {name}"
    words = f"{thing} is {on_every(hosts)}"
    durable, arguments = (listed.durable, listed.amqp_arguments()) if listed else (True, {})
    replies = await ask_each(hosts, queue_like(name, durable=durable, arguments=arguments))
    if odd := odd_one(check, thing, replies):
        return odd
    reply = replies[0][1]
    if reply.answer not in (Answer.YES, Answer.REFUSED):
        return Finding(check, Verdict.OK, f"{words}; what it is like is not told: {reply.words}")
    different = "" if reply.answer is Answer.YES else (reply.difference or [reply.words])[0]
    if listed is None and different == "durable":
        remedy = "declare it again as durable: it is gone after a restart of the broker, with what is in it"
        return Finding(check, Verdict.WARNING, f"{words}, and not durable", remedy)
    if listed is None:  # in what else it differs from a queue without arguments is no fault
        return Finding(check, Verdict.OK, f"{words}, durable")
    if different and different not in NO_LOCATOR:
        remedy = "list it as it is, or delete it once it is empty and run `relay topology apply`"
        return Finding(check, Verdict.FAILED, f"{words}, and not as listed: {reply.words}", remedy)
    kind = f"{'durable' if listed.durable else 'not durable'}, of type {listed.type}"
    return Finding(check, Verdict.OK, f"{words}, as listed: {kind}")


def dead_letters(hosts: Sequence[OpenHost], settings: Settings) -> Iterator[Finding]:
    """See that what a consumer gives up goes somewhere."""
    check = "broker.dead_letter"
    newest = max((host.version for host in hosts), default=())
    bound = {each.exchange for each in settings.topology.bindings}
    for queue in settings.topology.queues:
        if queue.type is QueueType.STREAM:  # gives nothing up
            continue
        words = f"queue {queue.name}"
        if queue.dead_letter_exchange is None:
            yield Finding(check, Verdict.SKIPPED, f"{words} lists no dead_letter_exchange: {ASK_POLICY}")
        elif queue.dead_letter_exchange and queue.dead_letter_exchange not in bound:
            remedy = "list a binding from it: what no queue takes there is dropped without a word"
            words = f"{words}: nothing that is listed is bound to exchange {queue.dead_letter_exchange}"
            yield Finding(check, Verdict.WARNING, words, remedy)
        else:
            to = queue.dead_letter_exchange or "the default exchange"
            yield Finding(check, Verdict.OK, f"{words}: what is rejected or expires goes to {to}")
        if queue.type is QueueType.QUORUM and queue.delivery_limit is None:
            yield _delivery_limit(queue, newest)


def _delivery_limit(queue: Queue, newest: tuple[int, ...]) -> Finding:
    check, words = "broker.delivery_limit", f"queue {queue.name} lists no delivery_limit"
    if newest < (4,):
        return Finding(check, Verdict.SKIPPED, f"{words}: RabbitMQ 3 has no limit by default; {ASK_POLICY}")
    words = f"{words}: RabbitMQ 4 gives a message up after 20 deliveries"
    if queue.dead_letter_exchange is not None:
        return Finding(check, Verdict.OK, f"{words}, to the dead letters")
    remedy = f'list delivery_limit, dead_letter_exchange = "" and dead_letter_routing_key = "{queue.name}.dead"'
    return Finding(check, Verdict.WARNING, f"{words}, and drops it", remedy)


async def growth(hosts: Sequence[OpenHost], settings: Settings) -> AsyncIterator[Finding]:
    """See that each listed queue is bounded, loses nothing by it, and has room."""
    check = "broker.growth"
    for queue in settings.topology.queues:
        bounds = {"max_length": queue.max_length, "max_length_bytes": queue.max_length_bytes}
        told = " and ".join(f"{key} = {value}" for key, value in bounds.items() if value is not None)
        words = f"queue {queue.name}: {told}"
        if not told:
            yield Finding(check, Verdict.SKIPPED, f"queue {queue.name} lists no limit: {ASK_POLICY}")
        elif queue.type is not QueueType.STREAM and queue.overflow is not Overflow.REJECT_PUBLISH:
            lost = "are dropped" if queue.dead_letter_exchange is None else "go to the dead letters"
            remedy = 'list overflow = "reject-publish": the relay then keeps what the queue has no room for'
            yield Finding(check, Verdict.WARNING, f"{words}; when it is full, its oldest messages {lost}", remedy)
        elif queue.max_length is not None and (messages := await _messages(hosts[0], queue.name)) >= queue.max_length:
            remedy = "let its consumer catch up: each try puts a copy into the other queues of the exchange"
            words = f"{words}; it has {messages} messages, so it is full and the broker refuses more"
            yield Finding(check, Verdict.WARNING, words, remedy)
        else:
            yield Finding(check, Verdict.OK, words)


async def _messages(host: OpenHost, name: str) -> int:
    """Return how many messages a queue has; 0 if the host does not tell."""
    told = [0]

    async def count(channel: AbstractChannel) -> None:
        declared = await channel.queue_declare(name, passive=True)
        told.append(declared.message_count or 0)

    await host.ask(count)
    return told[-1]
