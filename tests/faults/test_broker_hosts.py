"""The list of the broker's hosts changes while the relay runs: it goes over in order, and repeats nothing."""

from collections.abc import Iterator

import pytest
from pamqp.commands import Basic
from structlog.testing import capture_logs
from yarl import URL

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.testing.servers.process import free_port
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.faults.hosts import to_hosts, two_hosts, with_url
from tests.support.eventually import eventually
from tests.support.names import Names, resolving
from tests.support.proxy import FaultProxy, Way

NAME = "rabbit.test"


@pytest.fixture
def names() -> Iterator[Names]:
    with resolving() as names:
        yield names


async def move(node: Node, settings: Settings) -> None:
    await node.use_hosts(settings.broker.url)


async def test_a_host_that_left_the_list_is_left_after_the_last_confirm(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    """A host leaves the list with a message in flight; the relay moves after the confirm, and repeats nothing."""
    async with two_hosts(settings) as (first, second), run_node(to_hosts(settings, first)) as node:
        await eventually(node.is_ready, "ready")
        first.hold(Way.DOWN)
        early = await outbox.insert("a")
        await first.wait_seen(Way.DOWN, Basic.Ack, 1)

        with capture_logs() as events:
            await move(node, to_hosts(settings, second))
            await eventually(lambda: bool(events), "it is leaving")
        late = await outbox.insert("b")
        first.release(Way.DOWN)

        messages = await queue.drain(2)
        assert [message.headers["x-outbox-id"] for message in messages] == [early, late]
        assert [message.headers.get("x-outbox-redelivered") for message in messages] == [None, None]
        assert events == [
            {"event": "broker.left", "host": f"127.0.0.1:{first.port}", "in_flight": 1, "log_level": "info"}
        ]
        assert [proxy.seen[Way.UP, Basic.Publish] for proxy in (first, second)] == [1, 1]
        assert first.connections == 0
        assert node.snapshot().broker_losses == {}
        assert node.hindrances() == {}


async def test_what_a_host_that_was_left_never_confirmed_is_repeated(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    """A host leaves the list and never confirms; its message goes out again on the next host, marked as a repeat."""
    async with (
        two_hosts(settings) as (first, second),
        run_node(to_hosts(settings, first), drain_timeout=0.2) as node,
    ):
        await eventually(node.is_ready, "ready")
        first.hold(Way.DOWN)
        id_ = await outbox.insert()
        await first.wait_seen(Way.DOWN, Basic.Ack, 1)

        await move(node, to_hosts(settings, second))
        await eventually(outbox.is_empty, "sent through the other")

    messages = await queue.drain(2)
    assert [message.headers["x-outbox-id"] for message in messages] == [id_, id_]
    assert [message.headers.get("x-outbox-redelivered") for message in messages] == [None, True]
    assert await outbox.column("attempts", id_) == 0


async def test_a_host_that_dies_while_it_is_left_is_not_waited_for(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    """A host dies while the relay leaves it; the relay moves at once, and does not wait for `drain_timeout`."""
    async with (
        two_hosts(settings) as (first, second),
        run_node(to_hosts(settings, first), drain_timeout=600.0) as node,
    ):
        await eventually(node.is_ready, "ready")
        first.hold(Way.DOWN)
        await outbox.insert()
        await first.wait_seen(Way.DOWN, Basic.Ack, 1)
        with capture_logs() as events:
            await move(node, to_hosts(settings, second))
            await eventually(lambda: bool(events), "it is leaving")

        first.cut()

        await eventually(outbox.is_empty, "sent through the other")
        assert node.snapshot().broker_losses == {"lost": 1}
    await queue.drain(2)


async def test_a_connection_stays_while_its_host_is_listed(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    """The list of hosts gets a new first entry; the connection stays, and only a loss brings the relay to that host."""
    async with two_hosts(settings) as (first, second), run_node(to_hosts(settings, first)) as node:
        await eventually(node.is_ready, "ready")

        await move(node, to_hosts(settings, second, first))
        await outbox.insert()

        await eventually(outbox.is_empty, "sent")
        assert [proxy.seen[Way.UP, Basic.Publish] for proxy in (first, second)] == [1, 0]
        first.cut()
        await eventually(lambda: second.connections == 1, "after a loss it goes by the new list")
    await queue.drain(1)


async def test_an_address_that_the_name_has_no_more_is_left_when_the_hosts_are_read_again(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode, names: Names
) -> None:
    """A host name gets another address; the relay moves when its hosts are read again, and loses no connection."""
    url, port = URL(settings.broker.url.get_secret_value()), free_port()
    upstream = str(url.host), url.port or 5672
    named = with_url(settings, str(url.with_host(NAME).with_port(port)))
    names[NAME] = ["127.0.0.2"]
    async with (
        FaultProxy(*upstream, at=("127.0.0.2", port)) as first,
        FaultProxy(*upstream, at=("127.0.0.3", port)) as second,
        run_node(named) as node,
    ):
        await eventually(node.is_ready, "ready")
        names[NAME] = ["127.0.0.3"]
        await outbox.insert()
        await eventually(outbox.is_empty, "sent where it was")
        assert second.connections == 0

        await node.use_hosts(named.broker.url)
        await eventually(lambda: (first.connections, second.connections) == (0, 1), "it goes over")
        await outbox.insert()
        await eventually(outbox.is_empty, "sent there")
        assert node.snapshot().broker_losses == {}
    await queue.drain(2)


async def test_hosts_that_are_given_while_none_lets_us_in_are_tried_next(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    """No listed host accepts the relay; a reload brings another host, and the relay connects to it next."""
    async with two_hosts(settings) as (first, second), run_node(to_hosts(settings, first)) as node:
        await eventually(node.is_ready, "ready")
        first.refusing = True
        first.cut()
        await eventually(lambda: "reset" in node.hindrances().get("broker", ""), "it says that nobody lets it in")

        await move(node, to_hosts(settings, second))
        await outbox.insert()

        await eventually(outbox.is_empty, "sent")
    await queue.drain(1)


async def test_a_host_that_lets_us_in_after_it_was_taken_from_the_list_is_left(
    settings: Settings, run_node: RunNode, outbox: Outbox
) -> None:
    """A host leaves the list while the relay connects to it; the relay moves to a listed one."""
    async with two_hosts(settings) as (first, second):
        first.hold(Way.DOWN)
        async with run_node(to_hosts(settings, first)) as node:
            await eventually(lambda: first.connections == 1, "it knocks")

            await move(node, to_hosts(settings, second))
            first.release(Way.DOWN)

            await eventually(lambda: (first.connections, second.connections) == (0, 1), "it goes over")
            await eventually(node.is_ready, "ready")
