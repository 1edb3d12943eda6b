"""The broker becomes unreachable in each possible way: the relay takes the next host, and counts the loss by reason."""

import asyncio
import secrets
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pamqp.commands import Basic, Exchange, Queue
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import Settings
from relay.servers.rabbitmq import connection as broker
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.faults.hosts import broker_host, to_hosts, two_hosts
from tests.faults.load import relaying, under_load
from tests.support.deaf import DeafProxy
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy, Way
from tests.support.queues import keep_queues

USER = "revoked"


async def test_after_a_loss_the_next_host_comes_first_and_nothing_is_declared(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    """A connection is lost; the relay tries the next host first, and declares nothing there."""
    async with two_hosts(settings) as (first, second), run_node(to_hosts(settings, first, second)) as node:
        await eventually(node.is_ready, "ready")
        assert (first.connections, second.connections) == (1, 0)

        first.cut()  # and takes connections again at once
        await eventually(lambda: node.snapshot().broker_losses == {"lost": 1}, "it notices")
        id_ = await outbox.insert()

        assert await queue.ids(1) == [id_]
        assert (first.connections, second.connections) == (0, 1)
        # In a split a node may take declarations, confirm messages for them and lose both.
        assert {method for way, method in second.seen if way is Way.UP} & {Exchange.Declare, Queue.Declare} == set()


async def test_a_host_that_hangs_up_before_a_word_is_passed_over(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host closes each connection at once; the relay connects to the next host."""
    create = broker._Socket.create

    async def create_and_be_late(
        self: broker._Socket, url: URL, **kwargs: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Create a stream that has ended before the library looks, as on a busy machine; the error then differs."""
        reader, writer = await create(self, url, **kwargs)
        if url.port == balancer.port:
            await eventually(reader.at_eof, "it hangs up")
        return reader, writer

    monkeypatch.setattr(broker._Socket, "create", create_and_be_late)
    async with (
        FaultProxy("127.0.0.1", free_port()) as balancer,  # with nothing behind it
        two_hosts(settings) as (host, _),
        run_node(to_hosts(settings, balancer, host)),
    ):
        id_ = await outbox.insert()

        assert await queue.ids(1) == [id_]


async def test_a_mute_host_is_left_for_the_next_before_a_confirm_is_overdue(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    """A host stops answering; missed heartbeats end the connection, and the next host gets the message."""
    async with two_hosts(settings) as (first, second):
        patient = to_hosts(settings, first, second, heartbeat=2, confirm_timeout=600.0)
        async with run_node(patient) as node:
            await eventually(node.is_ready, "ready")
            first.hold(Way.UP)
            first.hold(Way.DOWN)
            id_ = await outbox.insert()
            await first.wait_seen(Way.UP, Basic.Publish, 1)

            await eventually(outbox.is_empty, "sent through the other")
            assert node.snapshot().broker_losses == {"silent": 1}

    assert await queue.ids(1) == [id_]
    assert await outbox.column("attempts", id_) == 0


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("is_second_deaf", [False, True])
async def test_a_host_that_confirms_nothing_is_left_for_the_next(
    outbox: Outbox, settings: Settings, run_node: RunNode, *, is_second_deaf: bool
) -> None:
    """A host takes messages and confirms nothing; the next does so too, and gets probes alone; each is left."""
    host = broker_host(settings)
    async with DeafProxy(*host) as first, DeafProxy(*host) as second:
        second.is_deaf = is_second_deaf
        async with run_node(to_hosts(settings, first, second, confirm_timeout=2.0)) as node:
            id_ = await outbox.insert()
            await eventually(lambda: second.connections == 1, "it tries the second")
            first.is_deaf = False

            async def is_sent() -> bool:
                return str(await outbox.column("state", id_)) == "sent"

            await eventually(is_sent, "it finds a host that confirms")
            losses = node.snapshot().broker_losses

    assert losses.keys() == {"silent"}
    assert losses["silent"] >= 1 + is_second_deaf  # on a busy machine a confirm may take longer


async def test_a_cancellation_that_nobody_asked_for_is_a_lost_connection(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """The library cancels its own reader; the relay counts a silent connection, and connects again."""
    async with run_node() as node:
        await eventually(node.is_ready, "ready")

        reader_of_the_relay().cancel()  # as the library's own heartbeat does
        await eventually(lambda: node.snapshot().broker_losses == {"silent": 1}, "it notices")

        id_ = await outbox.insert()
        assert await queue.ids(1) == [id_]


@pytest.fixture
def revocable(rabbitmq: RabbitServer, broker_url: str) -> Iterator[Callable[[bool], None]]:
    """Yield a function that adds and deletes a user with all permissions in this test's virtual host."""
    vhost = broker_url.rpartition("/")[2]

    def allow(allowed: bool) -> None:
        if not allowed:
            rabbitmq.call(f'rabbit_auth_backend_internal:delete_user(<<"{USER}">>, <<"tests">>).')
            return
        rabbitmq.call(
            f'rabbit_auth_backend_internal:add_user(<<"{USER}">>, <<"{USER}">>, <<"tests">>), '
            f'rabbit_auth_backend_internal:set_permissions(<<"{USER}">>, <<"{vhost}">>, '
            '<<".*">>, <<".*">>, <<".*">>, <<"tests">>).'
        )

    allow(True)
    yield allow
    rabbitmq.call(f'catch rabbit_auth_backend_internal:delete_user(<<"{USER}">>, <<"tests">>).')


async def test_revoked_credentials_are_waited_for(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode, revocable: Callable[[bool], None]
) -> None:
    """The broker's user is deleted; the relay names the refusal, and goes on once the user is back."""
    url = URL(settings.broker.url.get_secret_value()).with_user(USER).with_password(USER)
    theirs = settings.model_copy(update={"broker": settings.broker.model_copy(update={"url": SecretStr(str(url))})})
    async with run_node(theirs) as node:
        await eventually(node.is_ready, "ready")

        revocable(False)
        await eventually(lambda: "ACCESS_REFUSED" in node.hindrances().get("broker", ""), "it says why")
        id_ = await outbox.insert()
        revocable(True)

        assert await queue.ids(1) == [id_]
        await eventually(outbox.is_empty, "marked")
    assert await outbox.column("attempts", id_) == 0


@pytest.mark.drills
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_broker_that_is_restarted_under_load_is_waited_for(
    settings: Settings, database_url: str, how: signal.Signals
) -> None:
    """The broker stops under load and starts again; the relay reconnects and repeats at most what was in flight."""
    with RabbitServer(schedulers=1) as own:
        url = own.add_vhost(f"restart_{secrets.token_hex(4)}")
        theirs = settings.model_copy(update={"broker": settings.broker.model_copy(update={"url": SecretStr(url)})})
        async with under_load(database_url, url) as load, relaying(theirs) as node:
            await load.comes_on()
            await asyncio.to_thread(keep_queues, own)

            await asyncio.to_thread(own.stop, how)
            await eventually(lambda: "Connect" in node.hindrances().get("broker", ""), "it says that nobody is there")
            own.launch()
            await asyncio.to_thread(own.await_up)

            await load.comes_on()
            await load.finish()
        assert load.repeats <= settings.relay.max_in_flight


def reader_of_the_relay() -> asyncio.Task[None]:
    """Return the task that reads from the relay's connection, which was opened last."""
    readers = [task for task in asyncio.all_tasks() if "Connection__reader" in str(task.get_coro())]
    return max(readers, key=lambda task: int(task.get_name().rpartition("-")[2]))
