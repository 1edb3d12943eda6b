"""The broker refuses every message, whatever it is: the relay waits, harms no row, and connects again."""

from collections.abc import AsyncIterator

import pytest
from aio_pika.abc import AbstractChannel
from pamqp.commands import Basic
from yarl import URL

from relay.config.settings import Settings
from relay.engine.node import Node
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.faults.hosts import to_hosts
from tests.support.eventually import eventually
from tests.support.proxy import Way
from tests.support.refusing import Refusal, RefusingProxy

LOW_DISK = Refusal(406, "PRECONDITION_FAILED - low disk space")
TOKEN_ENDED = Refusal(
    403,
    "ACCESS_REFUSED - access to exchange '{exchange}' in vhost '/' refused for user 'relay',"
    " backend rabbit_auth_backend_oauth2 returned an error: token has expired",
)


@pytest.fixture
async def proxy(settings: Settings) -> AsyncIterator[RefusingProxy]:
    url = URL(settings.broker.url.get_secret_value())
    async with RefusingProxy(str(url.host), url.port or 5672) as proxy:
        yield proxy


def says(node: Node, words: str) -> bool:
    return words in node.hindrances().get("broker", "")


@pytest.mark.parametrize("refusal", [LOW_DISK, TOKEN_ENDED], ids=["low disk", "token ended"])
@pytest.mark.parametrize("rows", [1, 2000])
async def test_no_row_is_parked_or_quarantined_and_all_go_out_when_it_is_well(
    outbox: Outbox,
    queue: Reader,
    settings: Settings,
    run_node: RunNode,
    proxy: RefusingProxy,
    refusal: Refusal,
    rows: int,
) -> None:
    proxy.refusal = refusal
    await outbox.insert_many(rows, keys=500)

    async with run_node(to_hosts(settings, proxy)) as node:
        await eventually(lambda: proxy.closed >= 8, "refused again and again")
        assert len(await outbox.ids("pending")) == rows
        assert says(node, refusal.words.partition(" - ")[0])
        assert not await outbox.quarantined_routes()
        proxy.refusal = None
        await eventually(outbox.is_at_rest, "sent")
        assert not node.hindrances()

    assert len(await outbox.ids("sent")) == rows
    attempts = await outbox.connection.execute("SELECT sum(attempts) FROM outbox.message")
    assert await attempts.fetchone() == (0,)
    assert len({message.message_id for message in await queue.everything()}) == rows


@pytest.mark.parametrize("refusal", [LOW_DISK, TOKEN_ENDED], ids=["low disk", "token ended"])
async def test_a_live_connection_that_is_refused_all_is_opened_again(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode, proxy: RefusingProxy, refusal: Refusal
) -> None:
    """Only a new connection brings a new token; so each message of the old one is refused."""
    async with run_node(to_hosts(settings, proxy)) as node:
        first = await outbox.insert("1")
        assert await queue.ids(1) == [first]
        proxy.refusal = refusal
        second = await outbox.insert("2")
        await proxy.wait_seen(Way.UP, Basic.Publish, 3)
        await eventually(lambda: bool(node.snapshot().broker_losses), "the connection is given up")
        proxy.refusal = None
        assert await queue.ids(1) == [second]
        assert not await outbox.quarantined_routes()

    assert await outbox.column("attempts", second) == 0


async def test_a_quarantined_route_does_not_keep_a_connection_that_is_refused_all(
    outbox: Outbox,
    channel: AbstractChannel,
    queue: Reader,
    settings: Settings,
    run_node: RunNode,
    proxy: RefusingProxy,
) -> None:
    """A probe that is refused as every message would be says nothing about its route, or about its row."""
    lost = await outbox.insert("1", exchange="", routing_key="later")
    async with run_node(to_hosts(settings, proxy)) as node:
        await eventually(lambda: outbox.are_aside([lost]), "it waits")
        proxy.refusal = LOW_DISK
        await eventually(lambda: bool(node.snapshot().broker_losses), "the connection is given up")
        proxy.refusal = None
        await channel.declare_queue("later", durable=True)
        await eventually(outbox.is_at_rest, "sent")

    assert await outbox.ids("sent") == [lost]
    assert await outbox.column("attempts", lost) == 0


async def test_an_exchange_that_alone_is_refused_goes_to_quarantine(
    outbox: Outbox,
    queue: Reader,
    settings: Settings,
    run_node: RunNode,
    proxy: RefusingProxy,
) -> None:
    """A 406 over each message of one exchange is a fault of this exchange; its rows lose nothing, and others go on."""
    proxy.refusal = LOW_DISK._replace(refuses=lambda publish: publish.exchange == "odd")
    odd = [await outbox.insert(f"odd-{n}", exchange="odd") for n in range(3)]
    fine = [await outbox.insert(f"fine-{n}") for n in range(20)]

    async with run_node(to_hosts(settings, proxy)) as node:
        await eventually(outbox.is_empty, "nothing pending")
        await eventually(lambda: outbox.are_aside(odd, "low disk space"), "they wait aside")
        assert node.snapshot().broker_losses == {}

    assert await outbox.ids("sent") == fine
