"""The broker refuses a row: the relay finds it and parks it with the broker's words, and the others go on."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from pamqp.commands import Basic
from yarl import URL

from relay.config.settings import Settings
from relay.engine.row import Outcome
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.faults.hosts import to_hosts
from tests.support.eventually import eventually
from tests.support.proxy import Act, FaultProxy, Way

REFUSALS = 8  # of a queue that stays full
LARGEST = 100_000  # bytes that this broker takes; by itself 128 MiB


@pytest.fixture
def small_messages(rabbitmq: RabbitServer) -> Iterator[None]:
    """Set `max_message_size` for the channels that open during the test."""
    usual = rabbitmq.call("{ok, Size} = application:get_env(rabbit, max_message_size), Size.")
    rabbitmq.call(f"application:set_env(rabbit, max_message_size, {LARGEST}).")
    yield
    rabbitmq.call(f"application:set_env(rabbit, max_message_size, {usual}).")


@pytest.mark.usefixtures("small_messages")
async def test_it_is_parked_with_the_broker_s_words_and_nobody_else_is(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """The broker refuses one message as too large; its row is parked with the broker's words, and the rest is sent."""
    fine = [await outbox.insert(f"fine-{n}") for n in range(20)]
    refused = await outbox.insert("refused", payload=json.dumps("x" * LARGEST))
    fine += [await outbox.insert(f"fine-{n}") for n in range(20)]

    async with run_node() as node:
        await eventually(outbox.is_empty, "nothing is pending", 40)
        losses = sum(node.snapshot().broker_losses.values())

    assert await outbox.ids("parked") == [refused]
    assert await outbox.ids("sent") == fine
    assert await outbox.column("attempts", refused) == 1
    assert "larger than configured max size" in await outbox.column("last_error", refused)
    assert {int(str(m.headers["x-outbox-id"])) async for m in taken(queue)} == set(fine)
    # It ends a connection at most twice: among the others, and alone.
    assert losses <= 2


CRASH = """
    [exit(Channel, kill) || Channel <- rabbit_channel:list(),
        {vhost, Host} <- rabbit_channel:info(Channel, [vhost]), Host =:= <<"VHOST">>].
"""


@pytest.mark.parametrize("crashes", [1, 2])
async def test_a_crash_of_the_broker_s_blames_a_row_only_when_it_comes_again(
    outbox: Outbox,
    queue: Reader,
    settings: Settings,
    run_node: RunNode,
    rabbitmq: RabbitServer,
    crashes: int,
) -> None:
    """A channel of the broker crashes; the row loses an attempt only if the crash comes again."""
    url = URL(settings.broker.url.get_secret_value())
    await queue.channel.close()  # it would crash, too
    async with (
        FaultProxy(str(url.host), url.port or 5672) as proxy,
        run_node(to_hosts(settings, proxy)) as node,
    ):
        for crash in range(1, crashes + 1):
            proxy.on_frame(Way.UP, Basic.Publish, crash, Act.HOLD)
        id_ = await outbox.insert()
        for crash in range(1, crashes + 1):
            await proxy.wait_seen(Way.UP, Basic.Publish, crash)
            rabbitmq.call(CRASH.replace("VHOST", url.path.strip("/")))
            await eventually(
                lambda crash=crash: node.snapshot().broker_losses == {"internal_error": crash}, "it notices"
            )
            proxy.release(Way.UP)
        await eventually(outbox.is_empty, "sent")

    assert await outbox.ids("sent") == [id_]
    assert await outbox.column("attempts", id_) == crashes - 1


async def test_a_full_queue_is_asked_ever_more_rarely_and_gets_its_rows_in_order(
    outbox: Outbox, channel: AbstractChannel, run_node: RunNode
) -> None:
    """A full queue refuses messages; the relay backs off, and each key arrives in order once there is room."""
    limits = {"x-max-length": 1, "x-overflow": "reject-publish", "x-queue-type": "quorum"}
    full = await channel.declare_queue("full", durable=True, arguments=limits)  # type: ignore[arg-type]
    ids = [await outbox.insert(f"{n % 4}", exchange="", routing_key="full") for n in range(20)]
    taken_ids: list[int] = []

    async with run_node() as node:
        loop = asyncio.get_running_loop()
        await eventually(lambda: node.snapshot().failures[Outcome.NACKED] > 0, "it refuses")
        begun = loop.time()
        await eventually(lambda: node.snapshot().failures[Outcome.NACKED] >= REFUSALS, "it goes on to refuse")
        # At most four rows are refused at first, a row of each key. Then one row at a time waits 5, 20, 80 and 320 ms.
        assert loop.time() - begun > 0.3

        async def take() -> bool:
            is_at_rest = await outbox.is_at_rest()  # before the look: a row may come and be marked in between
            message = await full.get(no_ack=True, fail=False)
            if message is not None:
                taken_ids.append(int(str(message.headers["x-outbox-id"])))
            return message is None and is_at_rest

        await eventually(take, "every row has found room", 60)
        assert node.snapshot().broker_losses == {}

    assert sorted(taken_ids) == ids
    for key in range(4):
        assert [id_ for id_ in taken_ids if id_ in ids[key::4]] == ids[key::4]
    cursor = await outbox.connection.execute("SELECT max(attempts) FROM outbox.message")
    assert await cursor.fetchone() == (0,)


async def taken(queue: Reader) -> AsyncIterator[AbstractIncomingMessage]:
    while (message := await queue.queue.get(no_ack=True, fail=False)) is not None:
        yield message
