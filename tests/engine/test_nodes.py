"""Several nodes on one table: they share the lanes, and hand them over with nothing lost, doubled or out of order."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from operator import itemgetter

import pytest

from relay.config.settings import Ordering, Settings
from relay.engine.node import Node
from relay.engine.read import floors
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually
from tests.support.proxied import proxied


def lanes(nodes: Sequence[Node]) -> list[int]:
    return [node.snapshot().lanes for node in nodes]


async def share(nodes: Sequence[Node], *numbers: int) -> None:
    await eventually(lambda: lanes(nodes) == list(numbers), f"{numbers} lanes")


async def test_nodes_that_come_and_go_share_the_lanes(run_node: RunNode) -> None:
    async with run_node(node="a") as a, AsyncExitStack() as later:
        await share([a], 16)
        b = await later.enter_async_context(run_node(node="b"))
        await share([a, b], 8, 8)
        async with run_node(node="c") as c:
            await share([a, b, c], 6, 5, 5)
        await share([a, b], 8, 8)
        await later.aclose()
        await share([a], 16)


@pytest.mark.parametrize("ordering", Ordering)
async def test_under_load_a_hand_over_neither_loses_nor_doubles_nor_reorders(
    outbox: Outbox, queue: Reader, run_node: RunNode, ordering: Ordering
) -> None:
    written = 0
    async with run_node(node="a", ordering=ordering) as a, AsyncExitStack() as others:
        for number in range(6):
            for _ in range(5):
                await outbox.insert_many(200, keys=40)
                written += 200
                await asyncio.sleep(0.02)
            if number % 3 < 2:
                await others.enter_async_context(run_node(node=f"b{number}", ordering=ordering))
            else:
                await others.aclose()
        await eventually(outbox.is_empty, "every row marked")
        await share([a], 16)

    messages = await queue.drain(written)
    sent = [(str(message.headers["x-aggregate-id"]), int(str(message.headers["x-outbox-id"]))) for message in messages]
    for _, group in groupby(sorted(sent, key=itemgetter(0)), itemgetter(0)):
        ids = [id_ for _, id_ in group]
        assert ids == sorted(set(ids))


async def test_a_standby_takes_the_lanes_only_when_nobody_else_can_deliver(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    async with run_node(node="spare", standby=True) as spare:
        await share([spare], 16)
        async with run_node(node="active") as active:
            await share([active, spare], 16, 0)
            first = await outbox.insert()
            assert await queue.ids(1) == [first]
        await share([spare], 16)
        last = await outbox.insert()
        assert await queue.ids(1) == [last]


async def test_a_node_cut_off_from_the_broker_gives_its_lanes_to_one_that_can_deliver(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    async with proxied(settings.broker) as (proxy, far):
        through = settings.model_copy(update={"broker": far})
        async with run_node(through, node="cut") as cut, run_node(node="fine") as fine:
            await share([cut, fine], 8, 8)
            proxy.refusing = True
            proxy.cut()
            await share([cut, fine], 0, 16)
            await outbox.insert_many(100)
            await eventually(outbox.is_empty, "every row marked")
            proxy.refusing = False
            await share([cut, fine], 8, 8)
    assert sorted(await queue.ids(100)) == await outbox.ids("sent")


@pytest.mark.drills
@pytest.mark.timeout(300)
async def test_lanes_that_move_every_second_keep_their_order_while_floors_are_saved(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two relays loses its broker every second, for a minute; keys stay in order, and no sweep finds a row."""
    monkeypatch.setattr(floors, "SAVE_INTERVAL", 0.003)
    written = 0
    async with proxied(settings.broker) as (proxy, far):
        through = settings.model_copy(update={"broker": far})
        quick = {"sweep_interval": 1.0, "max_in_flight": 50}
        async with run_node(through, node="cut", **quick) as cut, run_node(node="fine", **quick) as fine:
            for _ in range(30):
                for refuses, shares in ((False, (8, 8)), (True, (0, 16))):
                    proxy.refusing = refuses
                    if refuses:
                        proxy.cut()
                    moved = asyncio.create_task(share([cut, fine], *shares))
                    while not moved.done():
                        await outbox.insert_many(72, keys=36)
                        written += 72
                        await asyncio.sleep(0.1)
                    await moved
            proxy.refusing = False
            await eventually(outbox.is_empty, "every row marked")
            finds = [node.snapshot().sweep_finds for node in (cut, fine)]

    messages = await queue.drain_different(written)
    first = dict.fromkeys(
        (str(one.headers["x-aggregate-id"]), int(str(one.headers["x-outbox-id"]))) for one in messages
    )
    of_key: dict[str, list[int]] = {}
    for key, id_ in first:
        of_key.setdefault(key, []).append(id_)
    assert {key: ids for key, ids in of_key.items() if list(ids) != sorted(ids)} == {}
    assert finds == [0, 0]


async def test_while_nobody_can_deliver_the_lanes_stay(settings: Settings, run_node: RunNode) -> None:
    async with proxied(settings.broker) as (proxy, far):
        through = settings.model_copy(update={"broker": far})
        async with run_node(through, node="a") as a, run_node(through, node="b") as b:
            await share([a, b], 8, 8)
            proxy.refusing = True
            proxy.cut()
            await eventually(lambda: all("broker" in node.hindrances() for node in (a, b)), "both know")
            await asyncio.sleep(3)
            await eventually(lambda: sum(lanes([a, b])) == 16, "the lanes stay")
            proxy.refusing = False
            await share([a, b], 8, 8)


async def test_of_two_nodes_with_one_name_the_second_waits(run_node: RunNode) -> None:
    async with run_node(node="twin") as first:
        await share([first], 16)
        async with run_node(node="twin") as second:
            await eventually(lambda: "one of a kind" in second.hindrances().get("lanes", ""), "it says why")
            first.start_draining()
            await share([second], 16)
