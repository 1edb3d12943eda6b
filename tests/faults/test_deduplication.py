"""A deduplicating exchange or queue returns or nacks a repeat. That is no fault of the route: other rows go on."""

from collections.abc import AsyncIterator

import pytest
from aio_pika.abc import AbstractChannel
from pamqp.commands import Basic
from pamqp.common import FieldTable
from yarl import URL

from relay.config.settings import Settings
from relay.engine.row import Outcome
from relay.engine.send import refusals
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.faults.hosts import to_hosts
from tests.support.deduplicating import DeduplicatingProxy
from tests.support.eventually import eventually
from tests.support.proxy import Act, Way


@pytest.fixture
async def proxy(settings: Settings) -> AsyncIterator[DeduplicatingProxy]:
    url = URL(settings.broker.url.get_secret_value())
    async with DeduplicatingProxy(str(url.host), url.port or 5672) as proxy:
        yield proxy


@pytest.fixture
async def stored(outbox: Outbox, proxy: DeduplicatingProxy) -> list[int]:
    """Ids of rows whose confirms are held; `cut_confirms` makes repeats of them."""
    proxy.on_frame(Way.DOWN, Basic.Ack, 1, Act.HOLD)
    return [await outbox.insert(f"stored-{n}") for n in range(50)]


@pytest.fixture
async def full(channel: AbstractChannel, proxy: DeduplicatingProxy) -> None:
    """Let repeats be nacked: their queue is full."""
    arguments: FieldTable = {"x-max-length": 0, "x-overflow": "reject-publish"}
    await channel.declare_queue(proxy.repeats, durable=True, arguments=arguments)


async def cut_confirms(proxy: DeduplicatingProxy, queue: Reader, stored: list[int]) -> None:
    """Cut the connection when all are in the queue: what is on its way then would be known, and in no queue."""

    async def are_stored() -> bool:
        return await queue.count() == len(stored)

    await eventually(are_stored, "the rows are in the queue")
    proxy.cut()
    proxy.release(Way.DOWN)


async def test_new_rows_pass_the_repeats_of_a_cut(
    outbox: Outbox,
    queue: Reader,
    settings: Settings,
    run_node: RunNode,
    proxy: DeduplicatingProxy,
    stored: list[int],
) -> None:
    async with run_node(to_hosts(settings, proxy)):
        await cut_confirms(proxy, queue, stored)
        await proxy.wait_seen(Way.DOWN, Basic.Return, 1)
        new = [await outbox.insert(f"new-{n}") for n in range(50)]
        messages = await queue.drain_different(100)
        assert sorted({int(str(message.headers["x-outbox-id"])) for message in messages}) == stored + new
        assert not set(stored) <= set(await outbox.ids("sent")), "the repeats still wait"
        proxy.forget()
        await eventually(outbox.is_at_rest, "the exchange has forgotten the repeats")

    assert await outbox.ids("sent") == stored + new


@pytest.mark.usefixtures("full")
async def test_new_rows_pass_the_nacked_repeats_of_a_cut(
    outbox: Outbox,
    queue: Reader,
    settings: Settings,
    run_node: RunNode,
    proxy: DeduplicatingProxy,
    stored: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "LASTING_AFTER", 60.0)

    async with run_node(to_hosts(settings, proxy)) as node:
        await cut_confirms(proxy, queue, stored)
        await eventually(lambda: node.snapshot().failures[Outcome.NACKED] > 0, "a repeat is nacked")
        new = [await outbox.insert(f"new-{n}") for n in range(50)]
        messages = await queue.drain_different(100)
        assert sorted({int(str(message.headers["x-outbox-id"])) for message in messages}) == stored + new
        assert await outbox.quarantined_routes() == []
        assert not set(stored) <= set(await outbox.ids("sent")), "the repeats still wait"
        proxy.forget()
        await eventually(outbox.is_at_rest, "the queue has forgotten the repeats")

    assert await outbox.ids("sent") == stored + new


@pytest.mark.usefixtures("full")
async def test_new_rows_pass_the_nacked_repeats_that_come_back_from_quarantine(
    outbox: Outbox,
    queue: Reader,
    settings: Settings,
    run_node: RunNode,
    proxy: DeduplicatingProxy,
    stored: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No row is taken for long, so the route is in quarantine when the first new row comes."""
    monkeypatch.setattr(refusals, "LASTING_AFTER", 2.0)  # 5 s; shorter, a pause of the machine is a second quarantine

    async def is_quarantined() -> bool:
        return bool(await outbox.quarantined_routes())

    async with run_node(to_hosts(settings, proxy)):
        await cut_confirms(proxy, queue, stored)
        await eventually(is_quarantined, "the route is in quarantine")
        new = [await outbox.insert(f"new-{n}") for n in range(50)]
        messages = await queue.drain_different(100)
        assert sorted({int(str(message.headers["x-outbox-id"])) for message in messages}) == stored + new


async def test_a_route_works_although_its_first_row_was_sent_by_an_earlier_relay(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode, proxy: DeduplicatingProxy
) -> None:
    sent_before = await outbox.insert("before")
    proxy.known.add(str(await outbox.column("message_id", sent_before)))

    async with run_node(to_hosts(settings, proxy)):
        await proxy.wait_seen(Way.DOWN, Basic.Return, 1)
        new = [await outbox.insert(f"new-{n}") for n in range(20)]
        assert sorted(await queue.ids(20)) == new
        proxy.forget()
        assert await queue.ids(1) == [sent_before]
