"""The broker or what stands before it lets no connection or channel in: the relay says so and asks ever more rarely."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs
from yarl import URL

from relay.config.settings import BrokerSettings, DatabaseSettings, Settings
from relay.consume import Consumer, Inbox
from relay.engine.node import Node
from relay.errors import BrokerUnavailableError, OutboxError
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import count
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.faults.alarms import Alarm
from tests.support.events import named
from tests.support.eventually import eventually
from tests.support.proxied import with_port
from tests.support.proxy import FaultProxy

WATCHED = 4.0  # seconds
# After 0.1 s, the waits double up to 3 s, each shortened by chance; so there is room for seven tries.
MOST_TRIES = 10

NO_CONNECTION = "connection limit (0) is reached"
NO_CHANNEL = "maximum allowed user limit of (0)"


async def limit_vhost(rabbitmq: RabbitServer, vhost: str, limits: str) -> None:
    await asyncio.to_thread(rabbitmq.ctl, "set_vhost_limits", "--vhost", vhost, limits)


async def reasons_in_status(outbox: Outbox) -> str:
    """Return what `relay status` shows of the relay: the reasons that it has written."""

    async def has_reasons() -> bool:
        cursor = await outbox.connection.execute("SELECT reasons::text FROM outbox.node")
        found[:] = [str(reasons) for (reasons,) in await cursor.fetchall() if reasons]
        return "broker" in "".join(found)

    found: list[str] = []
    await eventually(has_reasons, "it has written why")
    return "".join(found)


@pytest.fixture
def limited(rabbitmq: RabbitServer, broker: BrokerSettings) -> BrokerSettings:
    """A user of the test's virtual host that may open no channel."""
    url = URL(broker.url.get_secret_value())
    vhost, name = url.path.strip("/"), f"limited-{url.path.strip('/')}"
    rabbitmq.ctl("add_user", name, "secret")
    rabbitmq.ctl("set_permissions", "--vhost", vhost, name, ".*", ".*", ".*")
    rabbitmq.ctl("set_user_limits", name, '{"max-channels": 0}')
    return broker.model_copy(update={"url": SecretStr(str(url.with_user(name).with_password("secret")))})


async def assert_patient(node: Node, words: str, tries: Callable[[], int]) -> None:
    """Check that a node names what keeps it out, and asks seldom."""
    await eventually(lambda: words in node.hindrances().get("broker", ""), "it says why")
    await asyncio.sleep(WATCHED)  # how often it tries can only be seen over time
    assert 1 < tries() <= MOST_TRIES
    assert words in node.hindrances()["broker"]


@asynccontextmanager
async def counted(settings: Settings, broker: BrokerSettings) -> AsyncIterator[tuple["Counting", Settings]]:
    """Yield a proxy to the broker that counts the tries, and the settings of a relay that connects through it."""
    port = URL(broker.url.get_secret_value()).port
    async with Counting("127.0.0.1", port or 5672) as proxy:
        yield proxy, settings.model_copy(update={"broker": with_port(broker, proxy.port)})


class Counting(FaultProxy):
    tries = 0  # connections that have ended

    def ended(self, connection: int) -> None:  # noqa: ARG002 - the proxy calls it so
        self.tries += 1


async def test_a_connection_limit_is_named_and_asked_ever_more_rarely(
    settings: Settings, rabbitmq: RabbitServer, outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    vhost = settings.broker.url.get_secret_value().rpartition("/")[2]
    with capture_logs() as events:
        async with counted(settings, settings.broker) as (proxy, near), run_node(near) as node:
            await eventually(node.is_ready, "it is ready")

            await limit_vhost(rabbitmq, vhost, '{"max-connections": 0}')
            proxy.cut()
            await assert_patient(node, NO_CONNECTION, lambda: proxy.tries)
            assert NO_CONNECTION in await reasons_in_status(outbox)
            await limit_vhost(rabbitmq, vhost, "{}")

            id_ = await outbox.insert()
            assert await queue.ids(1) == [id_]
    assert any(NO_CONNECTION in event["reason"] for event in named(events, "broker.degraded"))


async def test_a_channel_limit_is_named_and_asked_ever_more_rarely(
    settings: Settings, limited: BrokerSettings, outbox: Outbox, run_node: RunNode
) -> None:
    with capture_logs() as events:
        async with counted(settings, limited) as (proxy, near), run_node(near) as node:
            await assert_patient(node, NO_CHANNEL, lambda: proxy.tries)
            assert NO_CHANNEL in await reasons_in_status(outbox)
    assert any(NO_CHANNEL in event["reason"] for event in named(events, "broker.degraded"))


async def test_a_load_balancer_that_hangs_up_is_named_and_asked_ever_more_rarely(
    settings: Settings, outbox: Outbox, run_node: RunNode
) -> None:
    """It accepts each connection, has no broker behind it, and closes the connection."""
    nowhere = settings.broker.model_copy(update={"url": SecretStr(f"amqp://127.0.0.1:{free_port()}/")})
    async with counted(settings, nowhere) as (proxy, near), run_node(near) as node:
        await assert_patient(node, str(proxy.port), lambda: proxy.tries)
        assert str(proxy.port) in await reasons_in_status(outbox)


@pytest.mark.parametrize("alarm", ["memory"], indirect=True)
async def test_an_alarm_in_which_only_old_connections_stay_is_waited_out(
    settings: Settings, outbox: Outbox, queue: Reader, run_node: RunNode, alarm: Alarm
) -> None:
    """The relay keeps its connection; one that starts meanwhile names the refusal, and waits."""
    async with counted(settings, settings.broker) as (proxy, near), run_node(near) as node:
        await eventually(node.is_ready, "it is ready")
        await alarm.raise_()
        proxy.refusing = True
        id_ = await outbox.insert()
        await eventually(lambda: node.hindrances().get("broker") == alarm.reason, "it says why")
        async with run_node(near, node="second") as second:
            await eventually(lambda: str(proxy.port) in second.hindrances().get("broker", ""), "it says who refuses")
        await alarm.clear()

        assert await queue.ids(1) == [id_]
        assert node.snapshot().broker_losses == {}


async def test_a_consumer_is_told_of_a_channel_limit_at_the_start(
    database: DatabaseSettings, limited: BrokerSettings
) -> None:
    consumer = Consumer("billing", [count], inbox=Inbox(database, "projection"), broker=limited)

    with pytest.raises(BrokerUnavailableError, match=re.escape(NO_CHANNEL)):
        await consumer.run(signals=False)


async def test_a_consumer_is_told_of_a_queue_limit_at_the_start(
    database: DatabaseSettings, broker: BrokerSettings, rabbitmq: RabbitServer, queue: Reader
) -> None:
    """Its queue is there, and the queue for its dead letters may not be added."""
    await limit_vhost(rabbitmq, broker.url.get_secret_value().rpartition("/")[2], '{"max-queues": 1}')
    consumer = Consumer(queue.queue.name, [count], inbox=Inbox(database, "projection"), broker=broker)

    with pytest.raises(OutboxError, match="queue limit in vhost"):
        await consumer.run(signals=False)
