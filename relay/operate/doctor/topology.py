"""Exchanges and queues: each is on every host, is as listed, lets us publish, and has an end to what it keeps.

A policy of the broker may add to what is listed. AMQP does not show it: where it matters, the line says how to ask.
A node of RabbitMQ 3.x that has parted from the others without a word keeps its own exchanges and queues.
"""

from collections.abc import AsyncIterator, Iterator, Sequence

from aiormq.abc import AbstractChannel

from relay.config.settings import Settings
from relay.config.topology import Exchange, ExchangeType, Overflow, Queue, QueueType
from relay.operate.doctor.broker_hosts import DEPRECATES, REFUSES_DEPRECATED, OpenHost, why_not_publish
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.question import (
    NO_LOCATOR,
    BrokerAnswer,
    Question,
    Reply,
    exchange_like,
    is_exchange,
    is_queue,
    publish_refused,
    queue_like,
)

AS_LISTED = "list it as it is, or delete it and run `relay topology apply`"


def exchanges(settings: Settings) -> list[str]:
    """Return the exchanges that the settings name, in their order."""
    listed = settings.topology.exchanges
    names = [
        *published_to(settings),
        *(each.name for each in listed),
        *(each.alternate_exchange for each in listed if each.alternate_exchange),
        *(each.dead_letter_exchange for each in settings.topology.queues if each.dead_letter_exchange),
    ]
    return [name for name in dict.fromkeys(names) if name]


def published_to(settings: Settings) -> list[str]:
    """Return the exchanges that the relay publishes to; the rows may name others."""
    return list(dict.fromkeys([*(route.exchange for route in settings.routes), settings.broker.exchange]))


async def exchanges_are_there(
    hosts: Sequence[OpenHost], settings: Settings, *, declares: bool
) -> AsyncIterator[Finding]:
    """See that each exchange is on every host, as listed, and that it outlives a restart of the broker.

    Args:
        declares: whether a relay will declare what is missing: one that starts does, one that runs does not.
    """
    check = "broker.exchange"
    listed = {each.name: each for each in settings.topology.exchanges}
    for name in exchanges(settings):
        at_start = declares and (name == settings.broker.exchange or name in listed)
        declaration = exchange_like(name, ExchangeType.TOPIC.value, durable=True) if at_start else None
        missing = await absence(check, f"exchange {name}", hosts, is_exchange(name), declaration=declaration)
        yield missing or await _exchange_as_it_is(check, name, listed.get(name), hosts)


async def _exchange_as_it_is(check: str, name: str, listed: Exchange | None, hosts: Sequence[OpenHost]) -> Finding:
    thing = f"exchange {name}"
    words = f"{thing} is {on_every(hosts)}"
    durable = listed is None or listed.durable
    kind = (listed.type if listed else ExchangeType.TOPIC).value
    replies = await ask_each(hosts, exchange_like(name, kind, durable=durable))
    first = replies[0][1]
    if first.difference and first.difference[0] == "type" and listed is None:
        kind = first.difference[1]
        replies = await ask_each(hosts, exchange_like(name, kind, durable=durable))
        first = replies[0][1]
    if odd := odd_one(check, thing, replies):
        return odd
    match first.difference:
        case None:
            return Finding(check, Verdict.OK, f"{words}; what it is like is not told: {first.words}")
        case ("alternate-exchange", alternate):
            words = f"{words}, {'durable' if durable else 'not durable, as listed'}, of type {kind}"
            if listed is None or (listed.alternate_exchange or "none") == alternate:
                return Finding(check, Verdict.OK, words)
            words = f"{words}, with alternate exchange {alternate}, and relay.toml says {listed.alternate_exchange}"
            return Finding(check, Verdict.FAILED, words, AS_LISTED)
        case (what, is_) if listed is not None:
            return Finding(check, Verdict.FAILED, f"{words}, and not as listed: {what} is {is_}", AS_LISTED)
        case (what, is_):
            remedy = "delete it and declare it again: durable, not auto-delete and not internal, it is there to stay"
            return Finding(check, Verdict.WARNING, f"{words}, but {what} is {is_}", remedy)


async def exchanges_are_open(hosts: Sequence[OpenHost], settings: Settings) -> AsyncIterator[Finding]:
    """See that we may publish to each exchange: by a message that every host refuses before it looks for queues."""
    check = "broker.write"
    for name in published_to(settings):
        words = f"exchange {name or '(default)'}"
        for host in hosts:
            if why := why_not_publish(host):
                yield Finding(check, Verdict.SKIPPED, f"{words}, {host.place}: {why}")
                continue
            reply = await host.ask(publish_refused(name, "outbox-doctor"))
            match reply.answer:
                case BrokerAnswer.REFUSED:
                    yield Finding(check, Verdict.OK, f"{words}: {host.place} lets us publish")
                case BrokerAnswer.FORBIDDEN:
                    user = host.connection.url.user
                    remedy = (
                        f"let {user} write to it: `rabbitmqctl set_permissions -p VHOST {user} CONFIGURE WRITE READ`"
                    )
                    yield Finding(check, Verdict.FAILED, f"{words}, {host.place}: {reply.words}", remedy)
                case _:  # missing, as found above, or no answer
                    yield Finding(check, Verdict.SKIPPED, f"{words}, {host.place}: {reply.words}")


ASK_POLICY = "`rabbitmqctl list_queues name effective_policy_definition` tells what a policy adds"


def addressed_queues(settings: Settings) -> list[str]:
    """Return the queues that routes address by the default exchange, as far as their names are written out."""
    named = (route.routing_key for route in settings.routes if not route.exchange)
    return list(dict.fromkeys(name for name in named if "{" not in name))


async def queues_are_there(hosts: Sequence[OpenHost], settings: Settings, *, declares: bool) -> AsyncIterator[Finding]:
    """See that each queue is on every host, and is as it is listed; `declares` as `exchanges_are_there`."""
    check = "broker.queue"
    listed = {each.name: each for each in settings.topology.queues}
    for name in dict.fromkeys([*addressed_queues(settings), *listed]):
        at_start = declares and name in listed
        declaration = queue_like(name, durable=True, arguments={}) if at_start else None
        missing = await absence(check, f"queue {name}", hosts, is_queue(name), declaration=declaration)
        yield missing or await _queue_as_it_is(check, name, listed.get(name), hosts)


async def _queue_as_it_is(check: str, name: str, listed: Queue | None, hosts: Sequence[OpenHost]) -> Finding:
    thing = f"queue {name}"
    words = f"{thing} is {on_every(hosts)}"
    durable, arguments = (listed.durable, listed.amqp_arguments()) if listed else (True, {})
    replies = await ask_each(hosts, queue_like(name, durable=durable, arguments=arguments))
    if odd := odd_one(check, thing, replies):
        return odd
    reply = replies[0][1]
    if reply.answer not in (BrokerAnswer.YES, BrokerAnswer.REFUSED):
        return Finding(check, Verdict.OK, f"{words}; what it is like is not told: {reply.words}")
    different = "" if reply.answer is BrokerAnswer.YES else (reply.difference or [reply.words])[0]
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


# Measured on 4.3.6: it takes x-queue-mode without effect, and ends a connection that declares with the second of these.
ARGUMENTS_REFUSED = {
    "x-queue-version": "take it out, or list 2",
    "x-queue-master-locator": "list x-queue-leader-locator in its place",
}
PERMIT = "deprecated_features.permit.transient_nonexcl_queues = true"


def deprecations(hosts: Sequence[OpenHost], settings: Settings) -> Iterator[Finding]:
    """See that a newer broker declares what is listed."""
    check = "broker.deprecated"
    newest = max((host.version for host in hosts), default=())
    if newest < DEPRECATES:
        return
    verdict = Verdict.FAILED if newest >= REFUSES_DEPRECATED else Verdict.WARNING
    for queue in settings.topology.queues:
        words = f"queue {queue.name}: from 4.3 on RabbitMQ refuses to declare"
        if not queue.durable:
            words = f"{words} what is neither durable nor exclusive, unless its configuration has {PERMIT}"
            remedy = "list durable = true, and delete the queue once it is empty"
            yield Finding(check, Verdict.WARNING, words, remedy)
        for argument, remedy in ARGUMENTS_REFUSED.items():
            value = queue.arguments.get(argument)
            if value is not None and (argument, value) != ("x-queue-version", 2):
                yield Finding(check, verdict, f"{words} {argument} = {value!r}", remedy)


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
        limits = " and ".join(f"{key} = {value}" for key, value in bounds.items() if value is not None)
        words = f"queue {queue.name}: {limits}"
        if not limits:
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
    """Return how many messages a queue has; 0 if the host does not say."""
    found = [0]

    async def count(channel: AbstractChannel) -> None:
        declared = await channel.queue_declare(name, passive=True)
        found.append(declared.message_count or 0)

    await host.ask(count)
    return found[-1]


PARTED = (
    "the hosts do not know the same: a node that was frozen or cut off may have parted from the others. Restart it,"
    " and declare while the cluster is whole"
)

Replies = Sequence[tuple[str, Reply]]  # with the place of each host, in the order of the list


async def ask_each(hosts: Sequence[OpenHost], question: Question) -> Replies:
    return [(host.place, await host.ask(question)) for host in hosts]


async def absence(
    check: str, thing: str, hosts: Sequence[OpenHost], question: Question, *, declaration: Question | None
) -> Finding | None:
    """Return where something is missing; None when every host has it.

    Args:
        declaration: what `relay run` would declare at its start, asked so that nothing is; None when it does not.
    """
    replies = await ask_each(hosts, question)
    lines = [f"{place}: {reply.words}" for place, reply in replies if reply.answer is not BrokerAnswer.YES]
    there = [place for place, reply in replies if reply.answer is BrokerAnswer.YES]
    missing = sum(reply.answer is BrokerAnswer.MISSING for _, reply in replies)
    if not lines:
        return None
    if not missing:
        return Finding(check, Verdict.SKIPPED, f"{thing}: {'; '.join(lines)}")
    if there:
        return Finding(check, Verdict.FAILED, f"{thing} is on {', '.join(there)}; {'; '.join(lines)}", PARTED)
    if declaration is None or missing < len(replies):
        remedy = "declare it, or list it in relay.toml and run `relay topology apply`"
        return Finding(check, Verdict.FAILED, f"{thing}: {'; '.join(lines)}", remedy)
    reply = await hosts[0].ask(declaration)
    if reply.answer is BrokerAnswer.FORBIDDEN:
        remedy = "run `relay topology apply` as a user who may, or let this one configure it (docs/topology.md)"
        return Finding(
            check, Verdict.FAILED, f"{thing} is missing, and `relay run` may not declare it: {reply.words}", remedy
        )
    return Finding(check, Verdict.OK, f"{thing} is missing; `relay run` declares it at its start")


def odd_one(check: str, thing: str, replies: Replies) -> Finding | None:
    """Return how something is not the same on every host; None when it is."""
    if len({(reply.answer, reply.difference) for _, reply in replies}) == 1:
        return None
    words = "; ".join(f"{place}: {reply.words or 'as asked for'}" for place, reply in replies)
    return Finding(check, Verdict.FAILED, f"{thing} is not the same on every host: {words}", PARTED)


def on_every(hosts: Sequence[OpenHost]) -> str:
    return "on every host" if len(hosts) > 1 else f"on {hosts[0].place}"
