"""The broker's part of the checklist: AMQP alone, host by host. Nothing is declared, and nothing reaches a queue."""

import asyncio
from collections.abc import AsyncIterator

from relay.config.settings import Settings
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
from relay.operate.doctor.exchanges import exchanges_are_open, exchanges_are_there, published_to
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.doctor.queues import dead_letters, growth, queues_are_there
from relay.operate.doctor.reached import reached

# Of the findings about a broker that lets us in, in the order of the checklist; `broker.tls` only where there is some.
CHECKS = (
    *("version", "cluster", "capabilities", "net_ticktime", "exchange", "queue", "alarm", "write", "reached"),
    *("dead_letter", "delivery_limit", "growth", "message_size"),
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
    for answers in (
        exchanges_are_there(hosts, settings),
        queues_are_there(hosts, settings),
        alarms(hosts),  # from here on: a connection that has published in an alarm is heard no more
        exchanges_are_open(hosts, settings),
    ):
        async for finding in answers:
            yield finding
    # On a thread: a database that does not answer must not keep us from the broker's heartbeats.
    for finding in await asyncio.to_thread(list, reached(settings, [name for name in published_to(settings) if name])):
        yield finding
    for finding in dead_letters(hosts, settings):
        yield finding
    async for finding in growth(hosts, settings):
        yield finding
    async for finding in message_size(hosts, settings):  # last: it may take its time
        yield finding
