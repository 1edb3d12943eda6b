"""Where the relay's messages go: each exchange is on every host, is there to stay, and lets us publish."""

from collections.abc import AsyncIterator, Sequence

from relay.config.settings import Settings
from relay.config.topology import Exchange, ExchangeType
from relay.operate.doctor.broker_hosts import OpenHost, why_not_publish
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.presence import absence, ask_each, odd_one, on_every
from relay.operate.doctor.question import Answer, exchange_like, is_exchange, publish_refused

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


async def exchanges_are_there(hosts: Sequence[OpenHost], settings: Settings) -> AsyncIterator[Finding]:
    """See that each exchange is on every host, as listed, and that it outlives a restart of the broker."""
    check = "broker.exchange"
    listed = {each.name: each for each in settings.topology.exchanges}
    for name in exchanges(settings):
        at_start = settings.broker.declare and (name == settings.broker.exchange or name in listed)
        declaration = exchange_like(name, ExchangeType.TOPIC.value, durable=True) if at_start else None
        missing = await absence(check, f"exchange {name}", hosts, is_exchange(name), declaration=declaration)
        yield missing or await _as_it_is(check, name, listed.get(name), hosts)


async def _as_it_is(check: str, name: str, listed: Exchange | None, hosts: Sequence[OpenHost]) -> Finding:
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
                case Answer.REFUSED:
                    yield Finding(check, Verdict.OK, f"{words}: {host.place} lets us publish")
                case Answer.FORBIDDEN:
                    user = host.connection.url.user
                    remedy = (
                        f"let {user} write to it: `rabbitmqctl set_permissions -p VHOST {user} CONFIGURE WRITE READ`"
                    )
                    yield Finding(check, Verdict.FAILED, f"{words}, {host.place}: {reply.words}", remedy)
                case _:  # missing, which is told above, or no answer
                    yield Finding(check, Verdict.SKIPPED, f"{words}, {host.place}: {reply.words}")
