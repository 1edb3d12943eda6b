"""Rows behind a route that does not work wait with it or go on, hide nobody, and follow in order."""

import asyncio
from contextlib import suppress

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from relay.config.settings import DatabaseSettings, KeyPolicy, Ordering
from relay.engine.read import positions
from relay.engine.row import Outcome
from relay.errors import NotFoundError, UsageError
from relay.operate.routes.quarantine import list_routes, reroute
from relay.operate.session import session
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually


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
        await eventually(lambda: outbox.are_aside([first, offered_with_it, read_later]), "they wait aside")
        words = {
            f"waits behind message {id_}" for id_ in (first, offered_with_it)
        }  # the first may be a probe just then
        assert await outbox.column("last_error", read_later) in words
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        last = await outbox.insert("1")
        assert await queue.ids(3) == [offered_with_it, read_later, last]
        assert await later.ids(1) == [first]
        await eventually(outbox.is_at_rest, "marked")

    assert await outbox.column("sent_at", first) <= await outbox.column("sent_at", offered_with_it)


async def test_with_skip_the_key_goes_on(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.engine.settle.quarantine.PROBE_INITIAL", 5.0)  # no probe is on its way at the end
    first = await outbox.insert("1", exchange="", routing_key="nowhere")
    followers = [await outbox.insert("1") for _ in range(3)]
    second = await outbox.insert("1", exchange="", routing_key="nowhere")

    async with run_node(key_policy=KeyPolicy.SKIP):
        assert await queue.ids(3) == followers
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("quarantined") == [first, second]


@pytest.mark.parametrize("key_policy", KeyPolicy)
async def test_without_order_by_key_rows_wait_too(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode, key_policy: KeyPolicy
) -> None:
    lost = [await outbox.insert(str(key), exchange="", routing_key="later") for key in range(50)]
    fine = [await outbox.insert(None) for _ in range(50)]

    async with run_node(ordering=Ordering.PIPELINED, key_policy=key_policy):
        await eventually(outbox.is_empty, "nothing pending")
        assert sorted(await queue.ids(50)) == fine
        await eventually(lambda: outbox.are_aside(lost), "they wait aside")
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
    monkeypatch.setattr(positions, "FAR", 0)
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
        assert node.snapshot().failures[Outcome.SUSPECT] == 0
        later = await channel.declare_queue("later", durable=True)
        if exchange:
            await later.bind(await channel.declare_exchange(exchange, aio_pika.ExchangeType.FANOUT))
        await outbox.insert_many(500, keys=500)
        await eventually(outbox.is_at_rest, "all sent", 60)

    assert await outbox.quarantined_routes() == []
    assert len(await outbox.ids("sent")) == 3_520
    arrived = set()
    for reader in (queue, Reader(channel, later)):
        firsts: dict[str, dict[int, None]] = {}
        for message in await reader.everything():
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
        assert await outbox.quarantined_routes() == [("", "full")]
        assert "basic.nack" in await outbox.column("last_error", innocent - 1)
        arrived: list[tuple[str, int]] = []

        async def take(message: AbstractIncomingMessage) -> None:
            arrived.append((str(message.headers["x-aggregate-id"]), int(str(message.headers["x-outbox-id"]))))

        await full.consume(take, no_ack=True)
        await eventually(outbox.is_at_rest, "all sent", 60)
        await eventually(lambda: len({id_ for _, id_ in arrived}) == 600, "all arrive")
        assert node.snapshot().broker_losses == {}

    assert await outbox.quarantined_routes() == []
    for key in {key for key, _ in arrived}:
        ids = list(dict.fromkeys(id_ for of, id_ in arrived if of == key))
        assert ids == sorted(ids)
    cursor = await outbox.connection.execute("SELECT max(attempts) FROM outbox.message")
    assert await cursor.fetchone() == (0,)


SET_ASIDE = """
    WITH route AS (
        INSERT INTO outbox.quarantine (exchange, routing_key, reason) VALUES ('', 'later', 'nothing was bound')
        ON CONFLICT (exchange, routing_key) DO UPDATE SET reason = excluded.reason
        RETURNING id
    )
    UPDATE outbox.message SET state = 'quarantined', quarantine = (SELECT id FROM route) WHERE id = ANY (%s)
"""
PARK = "UPDATE outbox.message SET state = 'parked', parked_at = now() WHERE id = %s"


@pytest.mark.usefixtures("refused_by_broker")
async def test_a_row_that_cannot_be_sent_itself_does_not_keep_its_route_in_quarantine(
    outbox: Outbox, channel: AbstractChannel, run_node: RunNode
) -> None:
    later = Reader(channel, await channel.declare_queue("later", durable=True))
    faulty = [await outbox.insert_faulty(str(key)) for key in range(20)]
    fine = [await outbox.insert(str(key), exchange="", routing_key="later") for key in range(20, 25)]
    await outbox.connection.execute("UPDATE outbox.message SET exchange = '', routing_key = 'later'")
    await outbox.connection.execute(SET_ASIDE, [[*faulty, *fine]])

    async with run_node(backoff_initial=30.0, backoff_max=60.0):
        assert sorted(await later.ids(5)) == fine


@pytest.mark.usefixtures("refused_by_broker")
async def test_alone_in_quarantine_it_is_parked_in_the_end(outbox: Outbox, run_node: RunNode) -> None:
    faulty = await outbox.insert_faulty()
    await outbox.connection.execute("UPDATE outbox.message SET exchange = '', routing_key = 'later'")
    await outbox.connection.execute(SET_ASIDE, [[faulty]])

    async with run_node(max_attempts=3):
        await eventually(lambda: is_parked(outbox, faulty), "parked")

    assert await outbox.column("attempts", faulty) == 3


async def test_rows_behind_a_parked_one_do_not_keep_their_route_in_quarantine(
    outbox: Outbox, channel: AbstractChannel, run_node: RunNode
) -> None:
    later = Reader(channel, await channel.declare_queue("later", durable=True))
    await outbox.connection.execute(PARK, [await outbox.insert("1")])
    held = [await outbox.insert("1", exchange="", routing_key="later") for _ in range(30)]
    fine = await outbox.insert("2", exchange="", routing_key="later")
    await outbox.connection.execute(SET_ASIDE, [[*held, fine]])

    async with run_node():
        assert await later.ids(1) == [fine]
        await eventually(outbox.is_at_rest, "the others are parked")

    assert (await outbox.ids("parked"))[1:] == held


@pytest.mark.usefixtures("refused_by_broker")
async def test_rows_behind_one_that_backs_off_do_not_keep_their_route_in_quarantine(
    outbox: Outbox, channel: AbstractChannel, run_node: RunNode
) -> None:
    later = Reader(channel, await channel.declare_queue("later", durable=True))
    await outbox.insert_faulty("1")
    behind = [await outbox.insert("1", exchange="", routing_key="later") for _ in range(30)]
    fine = await outbox.insert("2", exchange="", routing_key="later")
    await outbox.connection.execute(SET_ASIDE, [[*behind, fine]])

    async with run_node(backoff_initial=60.0, backoff_max=60.0):
        assert await later.ids(1) == [fine]


async def is_parked(outbox: Outbox, id_: int) -> bool:
    return await outbox.ids("parked") == [id_]


async def test_no_row_overtakes_its_key_while_an_operator_reroutes(
    outbox: Outbox, queue: Reader, run_node: RunNode, database: DatabaseSettings
) -> None:
    """Reroutes come while rows are set aside, probed and let go, and while later rows of their keys are written."""
    written: list[int] = []

    async def write(number: int) -> None:
        for each in range(number):
            address = {"exchange": "", "routing_key": "gone"} if each % 3 == 0 else {}
            written.append(await outbox.insert(str(each % 4), **address))

    def send_elsewhere(routing_key: str) -> None:
        with session(database) as tables:
            for route in list_routes(tables):
                with suppress(NotFoundError, UsageError):  # it is released by now, or has this address
                    to = {"exchange": "", "routing_key": routing_key}
                    reroute(tables, route, [], **to, by="ada", why="it is gone")

    async with run_node():
        for turn in range(8):
            to = queue.queue.name if turn % 3 == 2 else f"gone-{turn}"
            await asyncio.gather(write(20), asyncio.to_thread(send_elsewhere, to))
        while not await outbox.is_at_rest():
            await asyncio.to_thread(send_elsewhere, queue.queue.name)
        messages = await queue.drain(len(written))  # each once

    came: dict[str, list[int]] = {}
    for message in messages:
        came.setdefault(str(message.headers["x-aggregate-id"]), []).append(int(str(message.headers["x-outbox-id"])))
    assert sorted(id_ for ids in came.values() for id_ in ids) == written
    assert list(came.values()) == [sorted(ids) for ids in came.values()]
