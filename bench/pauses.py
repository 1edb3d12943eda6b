"""How long nothing is delivered when a server fails: `python -m bench.pauses`, compared with a plain client.

Three faults hit a steady load. The node that leads the queue is killed, the only broker is restarted, or the primary of
PostgreSQL is killed and its standby promoted. A plain client of the same server sends one message or row after the
other at the same time. Its wait is the server's own pause. See docs/benchmarks.md.
"""

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path

from pydantic import SecretStr

from bench.frame.error import BenchmarkError
from bench.frame.relay import BenchRelay
from bench.frame.run import Bench, Column, CountOrNone, Figures, Positive, main
from bench.frame.servers import new_database
from relay.config.settings import DatabaseSettings
from relay.errors import leaves
from relay.operate.schema.migrate import migrate
from relay.testing.servers.folders import temporary_folder
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from tests.faults.checker import Findings, Invariant, Verdict, invalid, report
from tests.faults.load import Load, under_load
from tests.support.cluster import Cluster, why_not
from tests.support.eventually import eventually
from tests.support.pair import Pair
from tests.support.plain_client import PlainClient, PlainPublisher, PlainWriter, longest_pause

TOO_LONG = 90.0  # seconds


class ServerFault(StrEnum):
    """What fails."""

    LEADER = "leader's node killed"  # in a cluster of three
    BROKER = "broker restarted"  # the only one
    PRIMARY = "primary killed"  # and its synchronous standby promoted


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The load around a fault, and the folder for logs."""

    folder: Path
    rate: float  # messages a second
    seconds: float  # of load before the fault, and after everything goes on


def measure(
    *,
    leader_rounds: CountOrNone = 5,
    broker_rounds: CountOrNone = 5,
    primary_rounds: CountOrNone = 5,
    rate: Positive = 500.0,
    seconds: Positive = 4.0,
    run: Bench,
) -> None:
    """Measure the pauses of delivery when a server fails. Exit code 1 when a message was lost.

    Parameters
    ----------
    leader_rounds
        How often the node of the queue's leader is killed, in a cluster of three; 0 leaves it out. It takes root.
    broker_rounds
        How often the only broker is restarted; 0 leaves it out.
    primary_rounds
        How often the primary of a synchronous pair is killed; 0 leaves it out.
    rate
        Messages a second, from four writers together.
    seconds
        How long they write before each fault, and after everything goes on.
    """
    logging.disable(logging.CRITICAL)  # the AMQP library logs every failed connection, fifty a second
    columns = Column("relay", "pause", 2), Column("own", "own", 2), Column("ratio", "ratio", 2)
    pauses = run.table(
        f"Longest time without a delivery at {rate:g} messages a second, and the server's own, s",
        *columns,
        Column("repeats", "repeats"),
        Column("messages/s before", "rate"),
    )
    if leader_rounds and (reason := why_not()) is not None:
        run.console.print(f"left out: {ServerFault.LEADER} ({reason})")
        leader_rounds = 0
    with temporary_folder() as folder:
        options = LoadOptions(folder, rate, seconds)
        if leader_rounds:
            with run.status("starting a cluster"), PostgresServer(durable=True) as postgres, Cluster() as cluster:
                numbers = count(1)
                pauses.measure(
                    {ServerFault.LEADER: lambda: kill_leader(options, postgres, cluster, next(numbers))}, leader_rounds
                )
        if broker_rounds:
            with (
                run.status("starting a broker"),
                PostgresServer(durable=True) as postgres,
                RabbitServer(durable=True) as broker,
            ):
                pauses.measure({ServerFault.BROKER: lambda: restart_broker(options, postgres, broker)}, broker_rounds)
        if primary_rounds:
            with run.status("starting a pair"), Pair() as pair, RabbitServer(durable=True) as broker:
                pauses.measure({ServerFault.PRIMARY: lambda: kill_primary(options, pair, broker)}, primary_rounds)


@dataclass(frozen=True, slots=True)
class FaultCase:
    """A fault, and the servers and clients that it hits.

    Attributes:
        relay_url: the broker, of which it may name several nodes.
        declare_url: the node that is to lead the queue of all messages.
        read_url: where that queue is read in the end, while what failed may still be gone.
        client: what the relay is compared with.
        strike: lets it happen.
    """

    fault: ServerFault
    database_url: str
    relay_url: str
    declare_url: str
    read_url: str
    client: PlainClient
    strike: Callable[[], Awaitable[None]]


def kill_leader(options: LoadOptions, postgres: PostgresServer, cluster: Cluster, number: int) -> Figures:
    """Kill the node that leads the queue and has the relay's connection, each round another one, and start it again."""
    leader = cluster.nodes[number % len(cluster.nodes)]
    followers = [node for node in cluster.nodes if node is not leader]
    vhost = _new_name()
    urls = [node.url(vhost) for node in (*followers, leader)]
    leader.add_vhost(vhost)
    client = PlainPublisher(urls)
    asyncio.run(client.declare(leader.url(vhost)))
    case = FaultCase(
        ServerFault.LEADER,
        new_database(postgres, _new_name()),
        cluster.urls(vhost, first=leader),
        leader.url(vhost),
        urls[0],
        client,
        lambda: asyncio.to_thread(leader.stop, signal.SIGKILL),
    )
    pause = _measure(options, case)
    asyncio.run(cluster.heal())
    leader.delete_vhost(vhost)
    return pause


def restart_broker(options: LoadOptions, postgres: PostgresServer, broker: RabbitServer) -> Figures:
    """End the broker in order and start it again."""
    vhost = _new_name()
    url = broker.add_vhost(vhost)
    client = PlainPublisher([url])
    asyncio.run(client.declare(url))

    async def restart() -> None:
        await asyncio.to_thread(broker.stop)
        broker.launch()
        await asyncio.to_thread(broker.await_up)

    case = FaultCase(ServerFault.BROKER, new_database(postgres, _new_name()), url, url, url, client, restart)
    pause = _measure(options, case)
    broker.delete_vhost(vhost)
    return pause


def kill_primary(options: LoadOptions, pair: Pair, broker: RabbitServer) -> Figures:
    """Kill the primary and promote its synchronous standby at once; then let the other one follow it."""
    vhost, database = _new_name(), _new_name()
    url = broker.add_vhost(vhost)
    pair.primary.create_database(database)
    database_url = pair.url(database)
    migrate(DatabaseSettings(url=SecretStr(database_url)))
    client = PlainWriter(database_url)
    asyncio.run(client.create())

    async def fail_over() -> None:
        await asyncio.to_thread(pair.primary.stop, signal.SIGKILL)
        await asyncio.to_thread(pair.promote)

    pause = _measure(options, FaultCase(ServerFault.PRIMARY, database_url, url, url, url, client, fail_over))
    broker.delete_vhost(vhost)
    pair.rejoin()
    return pause


def _new_name() -> str:
    return f"pauses_{secrets.token_hex(4)}"


def _measure(options: LoadOptions, case: FaultCase) -> Figures:
    """Return the longest pauses, in seconds: of the relay, of the plain client, and of the relay before the fault."""
    relay = BenchRelay(case.database_url, case.relay_url, options.folder, is_noted=True)
    with relay.running():
        try:
            load, findings, begun_at, struck_at = asyncio.run(_strike(options, case))
        except* TimeoutError as errors:
            raise BenchmarkError(f"{case.fault}: {next(leaves(errors))}") from errors
    confirmed_at = [at for _, at in relay.confirms.read()]
    before = [at for at in confirmed_at if begun_at <= at < struck_at]
    pause, own = longest_pause(confirmed_at, struck_at), longest_pause(case.client.answered_at, struck_at)
    return {
        "pause": pause,
        "own": own,
        "ratio": pause / own,
        "before": longest_pause(before),
        "rate": len(before) / (struck_at - begun_at),
        "messages": len(load.acknowledged),
        "repeats": load.repeats,
        "lost": count_lost(findings),
    }


async def _strike(options: LoadOptions, case: FaultCase) -> tuple[Load, Findings, float, float]:
    """Strike under load; return what was written, the checker's findings, and when load and fault began."""
    client = case.client
    async with (
        under_load(case.database_url, case.declare_url, rate=options.rate) as load,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(client.run(), name="plain client")
        await load.comes_on(TOO_LONG)
        begun_at = time.time()
        await asyncio.sleep(options.seconds)
        struck_at = time.time()
        await case.strike()
        happened_at = time.time()
        await load.comes_on(TOO_LONG)
        await eventually(lambda: client.answered_at[-1] > happened_at, "the plain client goes on", TOO_LONG)
        await asyncio.sleep(options.seconds)
        running.cancel()
        load.broker_url = case.read_url
        return load, await load.settle(TOO_LONG), begun_at, struck_at


def count_lost(findings: Findings) -> int:
    """Count what is lost; whatever else is wrong makes the measurement worthless.

    Raises:
        BenchmarkError: the checker does not know, or something was reordered, changed or invented.
    """
    lost = findings[Invariant.NOTHING_LOST]
    wrong = invalid(findings) - {Invariant.NOTHING_LOST}
    if lost.verdict is Verdict.UNKNOWN:
        wrong.add(Invariant.NOTHING_LOST)
    if wrong:
        raise BenchmarkError(report(findings, wrong))
    return len(lost.words)


if __name__ == "__main__":
    main(measure)
