"""The broker's part of the checklist: AMQP alone, host by host. Nothing is declared, and nothing reaches a queue."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from psycopg.sql import SQL

from relay.config.settings import Settings
from relay.engine.send.routes import Router
from relay.errors import OutboxError
from relay.operate.doctor.broker_hosts import (
    OpenHost,
    alarms,
    capabilities,
    certificates,
    close_each,
    clusters,
    connect_each,
    message_size,
    net_ticktime,
    versions,
)
from relay.operate.doctor.consumers import queues_are_consumed
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.topology import (
    dead_letters,
    deprecations,
    exchanges_are_open,
    exchanges_are_there,
    growth,
    published_to,
    queues_are_there,
)
from relay.operate.routes.quarantine import list_routes
from relay.operate.session import session
from relay.operate.status import list_nodes, route_reasons
from relay.servers.postgres.tables import Tables

# Of the findings about a broker that lets us in, in the order of the checklist; `broker.tls` only where there is some.
CHECKS = (
    *("version", "cluster", "capabilities", "net_ticktime", "exchange", "queue", "consumers", "alarm", "write"),
    *("reached", "deprecated", "dead_letter", "delivery_limit", "growth", "message_size"),
)


async def examine_broker(settings: Settings) -> AsyncIterator[Finding]:
    """Look at the broker; where no host lets us in every check is skipped."""
    hosts: list[OpenHost] = []
    try:
        async for finding in connect_each(settings, hosts):
            yield finding
        if hosts:
            async for finding in _examine(settings, hosts):
                yield finding
        else:
            for name in CHECKS:
                yield Finding(f"broker.{name}", Verdict.SKIPPED, "no connection")
    finally:
        await close_each(hosts)


async def _examine(settings: Settings, hosts: list[OpenHost]) -> AsyncIterator[Finding]:
    for check in (certificates, versions, clusters, capabilities, net_ticktime):
        for finding in check(hosts):
            yield finding
    declares = settings.broker.declare and not await asyncio.to_thread(is_relayed, settings)
    for answers in (
        exchanges_are_there(hosts, settings, declares=declares),
        queues_are_there(hosts, settings, declares=declares),
        queues_are_consumed(hosts, settings),
        alarms(hosts),  # from here on: a connection that has published in an alarm is heard no more
        exchanges_are_open(hosts, settings),
    ):
        async for finding in answers:
            yield finding
    # On a thread: a database that does not answer must not keep us from the broker's heartbeats.
    for finding in await asyncio.to_thread(list, reached(settings, [name for name in published_to(settings) if name])):
        yield finding
    for finding in [*deprecations(hosts, settings), *dead_letters(hosts, settings)]:
        yield finding
    async for finding in growth(hosts, settings):
        yield finding
    async for finding in message_size(hosts, settings):  # last: it may take its time
        yield finding


def is_relayed(settings: Settings) -> bool:
    """Whether a relay is alive, as far as the database tells."""
    try:
        with session(settings.database) as tables:
            return any(node.alive for node in list_nodes(tables))
    except OutboxError:
        return False


REACHED = "broker.reached"
QUARANTINED = "bind a queue to it, or mend what the reason says: the rows go out by themselves then"
LOOKED_AT = 10_000  # rows sent today, and as many of yesterday's

# The first of each day: what is sent on a day is much alike, and no index leads to the last ones. By whole days, as
# the partitions are: a limit on the time within one would have its rows read and thrown away.
READ_SENT = SQL("""
    SELECT aggregate_type, event_type, exchange, max(sent_at)
    FROM (
        (SELECT aggregate_type, event_type, exchange, sent_at
         FROM {schema}.sent(date_trunc('day', now(), 'UTC'), 'infinity')
         LIMIT {looked_at})
        UNION ALL
        (SELECT aggregate_type, event_type, exchange, sent_at
         FROM {schema}.sent(date_trunc('day', now() - interval '24 hours', 'UTC'), date_trunc('day', now(), 'UTC'))
         LIMIT {looked_at})
    ) AS sent
    GROUP BY aggregate_type, event_type, exchange
""")


def reached(settings: Settings, exchanges: Sequence[str]) -> Iterator[Finding]:
    """Yield for each exchange what is known of a queue that takes its messages."""
    try:
        with session(settings.database) as tables:
            in_quarantine = list_routes(tables)
            named, routed = _sent_to(tables, settings)
    except OutboxError as error:
        yield Finding(REACHED, Verdict.SKIPPED, f"what the relay has seen is in the database: {error}")
        return
    for reason in route_reasons(in_quarantine):
        yield Finding(REACHED, Verdict.FAILED, reason, QUARANTINED)
    for name in exchanges:
        words = f"exchange {name}"
        bound = [each.queue or each.to_exchange for each in settings.topology.bindings if each.exchange == name]
        if name in {waiting.exchange for waiting in in_quarantine}:
            continue
        if name in named:
            yield Finding(REACHED, Verdict.OK, f"{words}: a queue took a message at {named[name]}")
        elif name in routed:  # the table does not keep how it was routed
            words = f"{words}: a queue took a message at {routed[name]}, if the routes were then what they are now"
            yield Finding(REACHED, Verdict.SKIPPED, words)
        elif bound:
            to = ", ".join(map(str, bound))
            words = f"{words}: relay.toml binds {to} to it, and nothing sent since yesterday is seen"
            yield Finding(REACHED, Verdict.SKIPPED, words)
        else:
            words = f"{words}: relay.toml binds nothing to it, and nothing sent since yesterday is seen"
            remedy = (
                "see that a queue is bound to it: `rabbitmqctl list_bindings source_name destination_name routing_key`"
            )
            yield Finding(REACHED, Verdict.WARNING, words, remedy)


def _sent_to(tables: Tables, settings: Settings) -> tuple[dict[str, str], dict[str, str]]:
    """Return when a message was last seen to be sent, by the exchange that it named, and by that of its route."""
    router = Router.of(settings)
    named: dict[str, str] = {}
    routed: dict[str, str] = {}
    for aggregate_type, event_type, exchange, at in tables.execute(READ_SENT, looked_at=LOOKED_AT):
        of = routed if exchange is None else named
        name = exchange if exchange is not None else router.route(aggregate_type.encode(), event_type.encode()).exchange
        of[name] = max(of.get(name, ""), f"{at:%Y-%m-%d %H:%M:%S %Z}")
    return named, routed
