"""A route that does not work puts its rows aside, in nobody's way, and lets them go when it works again."""

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from relay.engine import tail
from relay.engine.row import Outcome
from relay.settings import KeyPolicy, Ordering, Wire
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually
from tests.support.rabbitmq import RabbitServer


async def routes(outbox: Outbox) -> list[tuple[str, str]]:
    cursor = await outbox.connection.execute("SELECT exchange, routing_key FROM outbox.quarantine ORDER BY id")
    return await cursor.fetchall()


async def is_at_rest(outbox: Outbox) -> bool:
    return await outbox.is_empty() and not await outbox.ids("quarantined")


async def everything(queue: Reader) -> list[AbstractIncomingMessage]:
    """Take all that was confirmed: also repeats, whose number nobody knows."""
    declared = await queue.channel.declare_queue(queue.queue.name, passive=True)
    return await queue.drain(declared.declaration_result.message_count or 0)


@pytest.mark.parametrize("wire", Wire)
async def test_with_nothing_bound_rows_wait_unharmed_until_something_is(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode, wire: Wire
) -> None:
    lost = [await outbox.insert(str(key), exchange="", routing_key="later") for key in (1, 1, 2)]
    fine = await outbox.insert("3")

    async with run_node(wire=wire, max_attempts=1):
        await eventually(outbox.is_empty, "nothing pending")
        assert await queue.ids(1) == [fine]
        assert await outbox.ids("quarantined") == lost
        assert await routes(outbox) == [("", "later")]
        for id_ in lost:
            assert await outbox.column("attempts", id_) == 0
            assert "312 NO_ROUTE" in await outbox.column("last_error", id_)
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        assert sorted(await later.ids(3)) == lost
        await eventually(lambda: is_at_rest(outbox), "marked")

    assert await outbox.ids("sent") == [*lost, fine]
    assert await routes(outbox) == []


@pytest.mark.parametrize("wire", Wire)
async def test_a_missing_exchange_stops_nobody_else(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode, wire: Wire
) -> None:
    lost = [await outbox.insert(f"lost-{n}", exchange="missing") for n in range(3)]
    fine = [await outbox.insert(f"fine-{n}") for n in range(20)]

    async with run_node(wire=wire, max_attempts=1):
        await eventually(outbox.is_empty, "nothing pending")
        assert await outbox.ids("sent") == fine
        assert await outbox.ids("quarantined") == lost
        assert "no exchange 'missing'" in await outbox.column("last_error", lost[0])
        # Neighbours in flight when the channel closed may go out twice, and say so.
        messages = await everything(queue)
        assert {int(str(m.headers["x-outbox-id"])) for m in messages} == set(fine)
        firsts = set()
        for message in messages:
            assert message.message_id not in firsts or message.headers.get("x-outbox-redelivered")
            firsts.add(message.message_id)
        await queue.queue.bind(await channel.declare_exchange("missing", aio_pika.ExchangeType.FANOUT))
        assert sorted(await queue.ids(3)) == lost
        await eventually(lambda: is_at_rest(outbox), "marked")

    assert await outbox.column("attempts", lost[0]) == 0


async def test_a_forbidden_exchange_is_waited_for(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode, rabbitmq: RabbitServer, broker_url: str
) -> None:
    vhost = broker_url.rpartition("/")[2]
    user = broker_url.partition("//")[2].partition(":")[0]
    await queue.queue.bind(await channel.declare_exchange("secret", aio_pika.ExchangeType.FANOUT))
    rabbitmq.ctl("set_permissions", "-p", vhost, user, ".*", "^(?!secret)", ".*")
    secret, fine = await outbox.insert("1", exchange="secret"), await outbox.insert("2")

    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "nothing pending")
        assert await queue.ids(1) == [fine]
        assert await outbox.ids("quarantined") == [secret]
        assert "access to exchange 'secret'" in await outbox.column("last_error", secret)
        rabbitmq.ctl("set_permissions", "-p", vhost, user, ".*", ".*", ".*")
        assert await queue.ids(1) == [secret]


async def test_later_rows_of_the_key_wait_behind_it_and_follow_in_order(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode
) -> None:
    before = await outbox.insert("1")
    first = await outbox.insert("1", exchange="", routing_key="later")
    offered_with_it = await outbox.insert("1")
    other = await outbox.insert("2")

    async with run_node():
        await eventually(outbox.is_empty, "nothing pending")
        read_later = await outbox.insert("1")
        await eventually(outbox.is_empty, "nothing pending")
        assert sorted(await queue.ids(2)) == [before, other]
        assert await outbox.ids("quarantined") == [first, offered_with_it, read_later]
        assert await outbox.column("last_error", read_later) == f"waits behind message {first}"
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        last = await outbox.insert("1")
        assert await queue.ids(3) == [offered_with_it, read_later, last]
        assert await later.ids(1) == [first]
        await eventually(lambda: is_at_rest(outbox), "marked")

    assert await outbox.column("sent_at", first) <= await outbox.column("sent_at", offered_with_it)


async def test_with_skip_the_key_goes_on(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    first = await outbox.insert("1", exchange="", routing_key="nowhere")
    followers = [await outbox.insert("1") for _ in range(3)]
    second = await outbox.insert("1", exchange="", routing_key="nowhere")

    async with run_node(key_policy=KeyPolicy.SKIP):
        assert await queue.ids(3) == followers
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("quarantined") == [first, second]


@pytest.mark.parametrize("ordering", [Ordering.PIPELINED, Ordering.NONE])
async def test_without_order_by_key_rows_wait_too(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode, ordering: Ordering
) -> None:
    lost = [await outbox.insert(str(key), exchange="", routing_key="later") for key in range(50)]
    fine = [await outbox.insert(None) for _ in range(50)]

    async with run_node(ordering=ordering):
        await eventually(outbox.is_empty, "nothing pending")
        assert sorted(await queue.ids(50)) == fine
        assert await outbox.ids("quarantined") == lost
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        assert sorted(await later.ids(50)) == lost


@pytest.mark.parametrize("exchange", ["", "missing"])
async def test_many_rows_for_it_hide_no_others_and_each_key_follows_in_order(
    outbox: Outbox,
    channel: AbstractChannel,
    queue: Reader,
    run_node: RunNode,
    exchange: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Lane by lane: the rows of a key come in several windows, and some of them while others are set aside.
    monkeypatch.setattr(tail, "FAR", 0)
    # Every third row of each key is for the route that does not work.
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)"
        " SELECT 'customer', (n %% 500)::text, 'InvoiceIssued', '1', CASE WHEN n %% 3 = 0 THEN %s END,"
        " CASE WHEN n %% 3 = 0 THEN 'later' END FROM generate_series(1, 3000) AS n",
        [exchange],
    )

    async with run_node() as node:
        await eventually(outbox.is_empty, "nothing pending", 60)
        innocent = [await outbox.insert(f"innocent-{n}") for n in range(20)]
        await eventually(outbox.is_empty, "nothing pending")
        assert set(innocent) <= set(await outbox.ids("sent"))
        # The exchange is named at once, so its rows do not each close a channel.
        assert node.figures().failures[Outcome.SUSPECT] == 0
        later = await channel.declare_queue("later", durable=True)
        if exchange:
            await later.bind(await channel.declare_exchange(exchange, aio_pika.ExchangeType.FANOUT))
        await outbox.insert_many(500, keys=500)
        await eventually(lambda: is_at_rest(outbox), "all sent", 60)

    assert await routes(outbox) == []
    assert len(await outbox.ids("sent")) == 3_520
    arrived = set()
    for reader in (queue, Reader(channel, later)):
        firsts: dict[str, dict[int, None]] = {}
        for message in await everything(reader):
            id_ = int(str(message.headers["x-outbox-id"]))
            firsts.setdefault(str(message.headers["x-aggregate-id"]), {}).setdefault(id_)
            arrived.add(id_)
        assert [list(ids) for ids in firsts.values()] == [sorted(ids) for ids in firsts.values()]
    assert len(arrived) == 3_520
    cursor = await outbox.connection.execute(
        "SELECT count(*) FROM (SELECT sent_at < lag(sent_at) OVER (PARTITION BY aggregate_id ORDER BY id) AS overtook"
        " FROM outbox.message) AS row WHERE overtook"
    )
    assert await cursor.fetchone() == (0,)


async def test_it_outlives_a_restart(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode
) -> None:
    first = await outbox.insert("1", exchange="", routing_key="later")
    async with run_node():
        await eventually(outbox.is_empty, "set aside")
    second = await outbox.insert("1")

    async with run_node():
        await eventually(outbox.is_empty, "nothing pending")
        assert await outbox.ids("quarantined") == [first, second]
        await channel.declare_queue("later", durable=True)
        assert await queue.ids(1) == [second]


async def test_an_owner_may_send_the_rows_elsewhere(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    lost = [await outbox.insert(str(key % 3), exchange="", routing_key="gone") for key in range(9)]

    async with run_node(sweep_interval=0.2):
        await eventually(outbox.is_empty, "set aside")
        await outbox.connection.execute(
            "UPDATE outbox.message SET state = 'pending', quarantine = NULL, exchange = '', routing_key = 'events'"
            " WHERE state = 'quarantined'"
            " AND quarantine = (SELECT id FROM outbox.quarantine WHERE routing_key = 'gone')"
        )
        assert sorted(await queue.ids(9)) == lost
        await eventually(lambda: is_left(outbox), "the route is forgotten")


async def is_left(outbox: Outbox) -> bool:
    return await routes(outbox) == []


async def test_a_queue_that_stays_full_hides_no_others_and_gets_its_rows_in_order(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode
) -> None:
    limits = {"x-max-length": 1, "x-overflow": "reject-publish", "x-queue-type": "quorum"}
    full = await channel.declare_queue("full", durable=True, arguments=limits)  # type: ignore[arg-type]
    # More keys than the window has rows.
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)"
        " SELECT 'customer', (n % 300)::text, 'InvoiceIssued', '1', '', 'full' FROM generate_series(1, 600) AS n"
    )

    async with run_node(max_window_rows=200) as node:
        innocent = await outbox.insert("innocent")
        assert await queue.ids(1) == [innocent]
        await eventually(outbox.is_empty, "the rows for the full queue wait aside", 30)
        assert await routes(outbox) == [("", "full")]
        assert "basic.nack" in await outbox.column("last_error", innocent - 1)
        arrived: list[tuple[str, int]] = []

        async def take(message: AbstractIncomingMessage) -> None:
            arrived.append((str(message.headers["x-aggregate-id"]), int(str(message.headers["x-outbox-id"]))))

        await full.consume(take, no_ack=True)
        await eventually(lambda: is_at_rest(outbox), "all sent", 60)
        await eventually(lambda: len({id_ for _, id_ in arrived}) == 600, "all arrive")
        assert node.figures().broker_losses == {}

    assert await routes(outbox) == []
    for key in {key for key, _ in arrived}:
        ids = list(dict.fromkeys(id_ for of, id_ in arrived if of == key))
        assert ids == sorted(ids)
    cursor = await outbox.connection.execute("SELECT max(attempts) FROM outbox.message")
    assert await cursor.fetchone() == (0,)


async def test_only_one_row_at_a_time_tries_the_route(outbox: Outbox, run_node: RunNode) -> None:
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)"
        " SELECT 'customer', n::text, 'InvoiceIssued', '1', '', 'nowhere' FROM generate_series(1, 500) AS n"
    )

    async with run_node(max_in_flight=100) as node:
        await eventually(outbox.is_empty, "set aside")
        before = node.figures().failures[Outcome.RETURNED]
        await eventually(lambda: was_probed(outbox, 2), "tried twice more")
        after = node.figures().failures[Outcome.RETURNED]

    assert before < 500
    assert after - before <= 3


async def test_a_probe_that_closes_its_channel_disturbs_nobody(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    await outbox.insert("lost", exchange="missing")

    async with run_node() as node:
        await eventually(outbox.is_empty, "set aside")
        fine: list[int] = []
        while not await was_probed(outbox, 2):
            fine.append(await outbox.insert(f"fine-{len(fine)}"))
        messages = await queue.drain(len(fine))
        assert node.figures().failures[Outcome.UNKNOWN] == 0
        assert node.figures().broker_losses == {}

    assert not any("x-outbox-redelivered" in message.headers for message in messages)


async def was_probed(outbox: Outbox, times: int) -> bool:
    cursor = await outbox.connection.execute("SELECT probes FROM outbox.quarantine")
    row = await cursor.fetchone()
    return row is not None and int(row[0]) >= times
