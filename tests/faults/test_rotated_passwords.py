"""A password changes under a running relay, consumer, pool or publisher: it names the refusal, and goes on by itself.

The file with the URL is renewed later than the password, as operators do it.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from structlog.testing import capture_logs

from relay.config.secret import SecretFile
from relay.config.settings import BrokerSettings, DatabaseSettings, RelaySettings
from relay.consume import Consumer, Inbox, WorkPolicy
from relay.consume.pool import PartitionedConsumer
from relay.outbox import Event
from relay.publisher import DurablePublisher
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.conftest import queue as consumed
from tests.consume.conftest import table
from tests.consume.effects import CONSUMER, Queue, Table, count, running
from tests.consume.policies import QUICK
from tests.consume.pool.conftest import candidate, partitions
from tests.consume.pool.partitions import Partitions
from tests.engine.conftest import Outbox, Reader
from tests.http.conftest import StartRelay, start_relay
from tests.support.eventually import eventually
from tests.support.logins import BrokerLogin, DatabaseLogin, Login

__all__ = ["consumed", "partitions", "start_relay", "table"]  # fixtures of those parts

TOLD_AFTER = 0.5  # seconds of refusals
SOON = {"stall_after": TOLD_AFTER, "backoff_initial": 0.05, "backoff_max": 0.2, "heartbeat_interval": 0.2}

every_end = pytest.mark.parametrize("end", ["database", "broker"])

Logins = dict[str, Login]


@pytest.fixture
def logins(
    postgres: PostgresServer, rabbitmq: RabbitServer, database_url: str, broker_url: str, tmp_path: Path
) -> Iterator[Logins]:
    """A login of this test for each end."""
    made: Logins = {
        "database": DatabaseLogin(postgres, database_url, tmp_path),
        "broker": BrokerLogin(rabbitmq, broker_url, tmp_path),
    }
    yield made
    for login in made.values():
        login.drop()


@pytest.fixture
def renewed_database(logins: Logins) -> DatabaseSettings:
    return DatabaseSettings(url=SecretFile(logins["database"].file))


@pytest.fixture
def renewed_broker(logins: Logins) -> BrokerSettings:
    return BrokerSettings(url=SecretFile(logins["broker"].file))


@every_end
async def test_a_relay_is_refused_says_so_and_goes_on(
    end: str, logins: Logins, start_relay: StartRelay, outbox: Outbox, queue: Reader
) -> None:
    """The password of one end changes; the relay names the refusal, is live, and goes on with the renewed file."""
    relay = start_relay(
        RELAY_LOG_FORMAT="json",
        RELAY_STALL_AFTER=str(TOLD_AFTER),
        **{f"RELAY_{name.upper()}_URL_FILE": str(login.file) for name, login in logins.items()},
        without=("RELAY_DATABASE_URL", "RELAY_BROKER_URL"),
    )
    await relay.wait_for_log("relay.ready")
    first = await outbox.insert()
    await eventually(outbox.is_empty, "the first is marked")  # else it comes again
    former = logins[end].password

    logins[end].change()
    second = await outbox.insert()

    async def is_told() -> bool:
        return f"{end}: refused for " in (await relay.site.get("/readyz")).body

    await eventually(is_told, "it says that it is refused")
    assert (await relay.site.get("/livez")).status == 200
    assert (await relay.site.value("outbox_connection_refused_seconds", end=end) or 0) >= TOLD_AFTER
    await relay.wait_for_log(f'"{end}.refused"')  # at the next try
    assert [event["level"] for event in relay.events() if event["event"] == f"{end}.refused"] == ["error"]
    if end == "broker":  # what a relay tells in its database, `relay status` shows
        statement = sql.SQL("SELECT reasons FROM outbox.node")

        async def is_written() -> bool:
            (reasons,) = await (await outbox.connection.execute(statement)).fetchone() or ((),)
            return any(reason.startswith("broker: refused for ") for reason in reasons)

        await eventually(is_written, "it writes the reason")

    logins[end].renew()
    assert await queue.ids(2) == [first, second]
    await eventually(outbox.is_empty, "all is marked")
    await eventually(relay.site.is_ready, "it is ready")
    assert await relay.site.value("outbox_connection_refused_seconds", end=end) == 0
    relay.process.stop(signal.SIGTERM)
    assert relay.process.returncode == 0
    assert not [word for word in (former, logins[end].password) if word in relay.log.read_text()]


@every_end
@pytest.mark.parametrize("kind", ["alone", pytest.param("pool", marks=pytest.mark.drills)])
async def test_a_consumer_is_refused_says_so_and_goes_on(
    kind: str,
    end: str,
    logins: Logins,
    consumed: Queue,
    partitions: Partitions,
    table: Table,
    database: DatabaseSettings,
    renewed_database: DatabaseSettings,
    renewed_broker: BrokerSettings,
) -> None:
    """The password of one end changes; the consumer names the refusal, and goes on with the renewed file."""
    inbox = Inbox(renewed_database, CONSUMER)
    consumer: Consumer | PartitionedConsumer
    if kind == "alone":
        consumer = Consumer(
            consumed.name,
            [count],
            inbox=inbox,
            broker=renewed_broker,
            work=WorkPolicy(backoff=QUICK, stall_after=TOLD_AFTER),
        )
    else:
        consumer = PartitionedConsumer(
            partitions.name,
            [count],
            inbox=inbox,
            broker=renewed_broker,
            work=WorkPolicy(concurrency=1, backoff=QUICK, stall_after=TOLD_AFTER),
        )

    async def send(number: int) -> None:
        await (consumed.send(number) if kind == "alone" else partitions.send([number]))

    async with candidate(database, "master"), running(consumer):
        await send(1)
        await eventually(lambda: consumer.counters.acknowledged == 1, "the first is applied")

        logins[end].change()
        await send(2)
        await eventually(
            lambda: any("refused for " in reason for reason in consumer.hindrances().values()), "it says so"
        )
        assert consumer.snapshot().refused_seconds[end] >= TOLD_AFTER

        logins[end].renew()
        await eventually(lambda: not consumer.hindrances(), "it is ready")
        await eventually(lambda: consumer.counters.applied >= 2, "the second is applied")
        assert set(consumer.snapshot().refused_seconds.values()) == {0}

    assert await table.numbers() == [1, 2]


@every_end
async def test_a_publisher_with_an_embedded_relay_goes_on(
    end: str,
    logins: Logins,
    renewed_database: DatabaseSettings,
    renewed_broker: BrokerSettings,
    outbox: Outbox,
    queue: Reader,
) -> None:
    """The password of one end changes; a publisher with an embedded relay goes on with the renewed file."""
    settings = RelaySettings.model_validate(SOON)
    events = [Event("customer", str(number), "InvoiceIssued", {"n": number}) for number in range(2)]
    async with DurablePublisher(
        renewed_database, broker=renewed_broker, name="sensors", relay=settings, embedded=True
    ) as publisher:
        await publisher.publish(events[0])

        async def is_at_work() -> bool:
            return await (await outbox.connection.execute("SELECT FROM outbox.node")).fetchone() is not None

        # One that still connects would do so with the former password, and lose no session.
        await eventually(is_at_work, "the relay has its session")
        logins[end].change()
        logins_are_refused = f"{end}: refused for "
        await eventually(lambda: any(logins_are_refused in reason for reason in publisher.state.reasons), "it says so")

        logins[end].renew()
        await publisher.publish(events[1])
        await eventually(lambda: not publisher.state.reasons, "all is well")

    messages = await queue.drain(2)
    assert [json.loads(message.body)["n"] for message in messages] == [0, 1]
    assert await outbox.is_empty()


def files_gone(logins: Logins) -> list[tuple[str, str]]:
    """Delete the files; return the event that each must cause when it is read."""
    for login in logins.values():
        login.file.unlink()
    return sorted(("secret.not_renewed", f"file {login.file}") for login in logins.values())


def told(logs: list[MutableMapping[str, Any]]) -> list[tuple[str, str]]:
    return sorted((event["event"], event["source"]) for event in logs if event["event"] == "secret.not_renewed")


@pytest.mark.parametrize("kind", ["alone", "pool"])
async def test_a_consumer_reads_its_files_again_at_sighup(
    kind: str,
    logins: Logins,
    consumed: Queue,
    partitions: Partitions,
    database: DatabaseSettings,
    renewed_database: DatabaseSettings,
    renewed_broker: BrokerSettings,
) -> None:
    """The secret files are gone at SIGHUP; the consumer names both, and works on with the values that it has."""
    kinds: dict[str, type[Consumer] | type[PartitionedConsumer]] = {"alone": Consumer, "pool": PartitionedConsumer}
    name = consumed.name if kind == "alone" else partitions.name
    consumer = kinds[kind](name, [count], inbox=Inbox(renewed_database, CONSUMER), broker=renewed_broker)
    async with candidate(database, "master"):
        running = asyncio.create_task(consumer.run())
        await eventually(lambda: not consumer.hindrances(), "it is ready")
        expected = files_gone(logins)

        with capture_logs() as logs:
            os.kill(os.getpid(), signal.SIGHUP)
            await eventually(lambda: told(logs) == expected, "both files were read")

        assert not consumer.hindrances()  # it goes on by the values that it has
        os.kill(os.getpid(), signal.SIGTERM)
        await running


async def test_a_publisher_reads_its_files_again_when_it_is_told(
    logins: Logins, renewed_database: DatabaseSettings, renewed_broker: BrokerSettings
) -> None:
    """The secret files are gone at a reload; the publisher names both, and works on with the values that it has."""
    async with DurablePublisher(renewed_database, broker=renewed_broker, name="sensors") as publisher:
        expected = files_gone(logins)

        with capture_logs() as logs:
            publisher.reload()

        assert told(logs) == expected
