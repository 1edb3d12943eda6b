"""`/readyz` is truthful within 10 s of a fault and ready within 5 s of the heal, with the default settings.

Each drill breaks its own server, and names the words with which the relay must notice.
"""

import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator

import aio_pika
import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings, Settings
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from tests.http.conftest import RelayProcess, StartRelay
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Way
from tests.support.releases import NEWEST

pytestmark = [pytest.mark.drills, pytest.mark.timeout(240)]

NOTICED_WITHIN, HEALED_WITHIN = 10.0, 5.0
FULL = {"x-max-length": 1, "x-overflow": "reject-publish"}


@pytest.fixture(scope="module")
def own_broker() -> Iterator[RabbitServer]:
    with RabbitServer(schedulers=1) as node:
        yield node


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    with PostgresServer(NEWEST) as server:
        yield server


@pytest.fixture
def settings(own_broker: RabbitServer, own_postgres: PostgresServer) -> Settings:
    name = f"drill_{secrets.token_hex(6)}"
    database = DatabaseSettings(url=SecretStr(own_postgres.create_database(name)))
    migrate(database)
    return Settings(database=database, broker=BrokerSettings(url=SecretStr(own_broker.add_vhost(name))))


@pytest.fixture
def database_url(settings: Settings) -> str:
    return settings.database.url.get_secret_value()


@pytest.fixture
async def relay(start_relay: StartRelay) -> RelayProcess:
    """A relay that is ready."""
    started = start_relay()
    await started.wait_for_log("relay.ready")
    await eventually(started.site.is_ready, "ready")
    return started


@pytest.fixture
async def queue(settings: Settings, rows: Rows) -> AsyncIterator[aio_pika.abc.AbstractQueue]:
    """A queue that takes one message and refuses the next."""
    async with await aio_pika.connect(settings.broker.url.get_secret_value()) as connection:
        channel = await connection.channel()
        yield await channel.declare_queue("full", durable=True, arguments=FULL)  # type: ignore[arg-type]


def states(rows: Rows) -> set[str]:
    return {state for state, _ in rows.states().values()}


async def let_go(_: aio_pika.abc.AbstractIncomingMessage) -> None:
    """Take a message, which frees its place in the queue."""


async def notices(relay: RelayProcess, words: str) -> None:
    async def is_told() -> bool:
        answer = await relay.site.get("/readyz")
        return answer.status == 503 and words in answer.body

    await eventually(is_told, f"it says {words!r}", NOTICED_WITHIN)
    assert (await relay.site.get("/livez")).status == 200


async def heals(relay: RelayProcess) -> None:
    await eventually(relay.site.is_ready, "ready again", HEALED_WITHIN)


async def test_an_idle_relay_notices_a_frozen_broker(own_broker: RabbitServer, relay: RelayProcess) -> None:
    """The broker freezes while the relay is idle; /readyz names it in time, and recovers with the broker."""
    os.kill(own_broker.pid, signal.SIGSTOP)
    try:
        await notices(relay, "broker: nothing has come from it")
    finally:
        os.kill(own_broker.pid, signal.SIGCONT)

    await heals(relay)


async def test_an_idle_relay_notices_a_killed_broker(own_broker: RabbitServer, relay: RelayProcess) -> None:
    """The broker is killed while the relay is idle; /readyz names it in time, and recovers with the broker."""
    own_broker.stop(signal.SIGKILL)
    await notices(relay, "broker: ")

    own_broker.start()

    await heals(relay)


async def test_an_idle_relay_notices_a_killed_database(own_postgres: PostgresServer, relay: RelayProcess) -> None:
    """The database is killed while the relay is idle; /readyz names it in time, and recovers with the database."""
    own_postgres.crash()
    await notices(relay, "database: ")

    own_postgres.start()

    await heals(relay)


async def test_an_idle_relay_notices_a_silent_database(settings: Settings, start_relay: StartRelay) -> None:
    """The database falls silent while the relay is idle; /readyz names it in time, and recovers with the database."""
    async with proxied(settings.database) as (proxy, far):
        relay = start_relay(RELAY_DATABASE_URL=far.url.get_secret_value())
        await relay.wait_for_log("relay.ready")
        await eventually(relay.site.is_ready, "ready")
        proxy.hold(Way.UP)
        proxy.hold(Way.DOWN)
        await notices(relay, "database: it has not answered")

        proxy.release(Way.UP)
        proxy.release(Way.DOWN)

        await heals(relay)


async def test_a_queue_that_is_full_is_a_fault_of_its_route_and_no_stall(
    rows: Rows, relay: RelayProcess, queue: aio_pika.abc.AbstractQueue
) -> None:
    """A queue refuses messages because it is full; its route is quarantined, and the relay stays ready."""
    for _ in range(5):
        rows.pending(None, exchange="", routing_key="full")
    await eventually(lambda: states(rows) == {"sent", "quarantined"}, "the others wait aside", NOTICED_WITHIN)
    await heals(relay)

    await queue.consume(let_go, no_ack=True)

    await eventually(lambda: states(rows) == {"sent"}, "all is sent")


async def test_a_table_that_is_locked_stalls_the_marks(
    database_url: str, rows: Rows, relay: RelayProcess, queue: aio_pika.abc.AbstractQueue
) -> None:
    """A lock keeps the relay from marking rows; /readyz names the lock and the stall, and recovers."""
    with psycopg.connect(database_url) as other:
        other.execute("LOCK TABLE outbox.message_sent IN SHARE MODE")  # writers and reads go on, marks do not
        rows.pending(None, exchange="", routing_key="full")
        await notices(relay, "has locked message_sent")
        await notices(relay, "delivery: nothing has settled")

        other.rollback()

        await heals(relay)


async def test_a_long_idle_is_fine(relay: RelayProcess) -> None:
    """Nothing happens for a long time; the relay stays ready, and logs no warning."""
    looks = 0

    async def has_idled() -> bool:
        nonlocal looks
        looks += 1
        assert await relay.site.is_ready()
        return looks > 1000

    await eventually(has_idled, "a thousand looks, of at least 20 s", 200)
    told = [event for event in relay.events() if event["event"] != "doctor.warning"]  # of the test's own server
    assert {event["level"] for event in told} == {"info"}
