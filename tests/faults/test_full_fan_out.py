"""One full queue of a fan-out: the others get few copies, and each queue gets the rows of a key in order."""

from collections import Counter
from collections.abc import Sequence

import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from pamqp.common import FieldTable

from relay.engine.row import Outcome
from tests.engine.conftest import Outbox, RunNode
from tests.support.depth import depth
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

ROWS, KEYS, ROOM, IN_FLIGHT = 1_000, 200, 20, 100


class Taker:
    """Takes what comes from one queue, and knows each message's key and id."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, int]] = []

    async def take(self, message: AbstractIncomingMessage) -> None:
        self.arrived.append((str(message.headers["x-aggregate-id"]), int(str(message.headers["x-outbox-id"]))))

    @property
    def ids(self) -> set[int]:
        return {id_ for _, id_ in self.arrived}

    def is_in_order(self) -> bool:
        """Whether the first copies of each key's rows came by their ids."""
        by_key: dict[str, list[int]] = {}
        for key, id_ in dict.fromkeys(self.arrived):
            by_key.setdefault(key, []).append(id_)
        return all(ids == sorted(ids) for ids in by_key.values())


@pytest.fixture
async def full(channel: AbstractChannel) -> AbstractQueue:
    limits: FieldTable = {"x-max-length": ROOM, "x-overflow": "reject-publish"}
    return await declare_bound(channel, "full", arguments=limits)


@pytest.fixture
async def healthy(channel: AbstractChannel) -> Sequence[AbstractQueue]:
    return [await declare_bound(channel, f"healthy-{n}") for n in range(2)]


async def test_the_other_queues_get_few_copies_and_all_get_each_key_in_order(
    outbox: Outbox, channel: AbstractChannel, full: AbstractQueue, healthy: Sequence[AbstractQueue], run_node: RunNode
) -> None:
    """One of three queues is full; copies in the others stay few, and each key arrives in order once there is room."""
    await outbox.insert_many(ROWS, keys=KEYS)

    async def count() -> int | None:
        return (await channel.declare_queue("healthy-0", passive=True)).declaration_result.message_count

    async with run_node(max_in_flight=IN_FLIGHT) as node:
        await eventually(outbox.is_empty, "the route is in quarantine", 30)
        # Those for which there was room, those in flight as the queue became full, and single tries since. A quorum
        # queue takes some more than its limit. If each row is tried again by itself, 1,700 come.
        assert await depth(count) < ROOM + 3 * IN_FLIGHT
        assert node.snapshot().failures[Outcome.NACKED] < 3 * IN_FLIGHT

        takers = [Taker() for _ in range(3)]
        for taker, queue in zip(takers, (full, *healthy), strict=True):
            await queue.consume(taker.take, no_ack=True)
        await eventually(outbox.is_at_rest, "all is sent", 60)
        for taker in takers:
            await eventually(lambda taker=taker: len(taker.ids) == ROWS, "every row has come")

    for taker in takers:
        assert taker.is_in_order()
        assert max(Counter(id_ for _, id_ in taker.arrived).values()) < 10
