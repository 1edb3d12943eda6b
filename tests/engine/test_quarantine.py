"""A route that does not work puts its rows aside, in nobody's way, and lets them go when it works again."""

import asyncio
from collections.abc import Collection
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from psycopg.sql import SQL

from relay.config.settings import DatabaseSettings, RelaySettings, Route, Settings, Unroutable
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read.gate import Gate
from relay.engine.read.tail import Tail
from relay.engine.row import ROWS_PER_MOVE, Address, Place, Row
from relay.engine.send.routes import Router
from relay.engine.send.sender import Sender
from relay.engine.session.session import LaneSession
from relay.engine.settle import quarantine_table
from relay.engine.settle.quarantine import PROBES_AT_A_TIME, Quarantine
from relay.engine.settle.quarantine_table import SET_ASIDE_BEHIND, QuarantineEntry, QuarantineTable
from relay.jobs.job import Job
from relay.operate.messages.whereabouts import whereabouts
from relay.operate.routes.quarantine import Changed, list_routes, probe, reroute
from relay.operate.routes.work import order_discard
from relay.operate.session import session
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.follower import IN_ORDER, unhurried
from tests.support.bulk import run_rows
from tests.support.eventually import eventually


async def test_with_nothing_bound_rows_wait_unharmed_until_something_is(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode
) -> None:
    lost = [await outbox.insert(str(key), exchange="", routing_key="later") for key in (1, 1, 2)]
    fine = await outbox.insert("3")

    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "nothing pending")
        assert await queue.ids(1) == [fine]
        await eventually(lambda: outbox.are_aside(lost, "312 NO_ROUTE"), "they wait aside")
        assert await outbox.quarantined_routes() == [("", "later")]
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        assert sorted(await later.ids(3)) == lost
        await eventually(outbox.is_at_rest, "marked")

    assert await outbox.ids("sent") == [*lost, fine]
    assert await outbox.quarantined_routes() == []


async def test_a_missing_exchange_stops_nobody_else(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode
) -> None:
    lost = [await outbox.insert(f"lost-{n}", exchange="missing") for n in range(3)]
    fine = [await outbox.insert(f"fine-{n}") for n in range(20)]

    async with run_node(max_attempts=1):
        await eventually(outbox.is_empty, "nothing pending")
        assert await outbox.ids("sent") == fine
        await eventually(lambda: outbox.are_aside(lost, "no exchange 'missing'"), "they wait aside")
        # Neighbours in flight when the channel closed may go out twice, and say so.
        messages = await queue.everything()
        assert {int(str(m.headers["x-outbox-id"])) for m in messages} == set(fine)
        firsts = set()
        for message in messages:
            assert message.message_id not in firsts or message.headers.get("x-outbox-redelivered")
            firsts.add(message.message_id)
        await queue.queue.bind(await channel.declare_exchange("missing", aio_pika.ExchangeType.FANOUT))
        assert sorted(await queue.ids(3)) == lost
        await eventually(outbox.is_at_rest, "marked")

    assert await outbox.column("attempts", lost[0]) == 0


async def test_many_rows_of_a_route_are_set_aside_in_pieces(
    outbox: Outbox, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    await outbox.insert("first", exchange="missing")
    async with run_node():
        await eventually(outbox.is_empty, "set aside")
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange)"
        " SELECT 'customer', n::text, 'InvoiceIssued', '1', 'missing' FROM generate_series(1, %s) AS n",
        [5 * ROWS_PER_MOVE],
    )
    moved: list[int] = []
    set_aside = QuarantineTable.set_aside

    async def note(table: QuarantineTable, rows: Collection[Row], *more: Any) -> dict[Address, QuarantineEntry]:
        moved.append(len(rows))
        return await set_aside(table, rows, *more)

    monkeypatch.setattr(QuarantineTable, "set_aside", note)
    async with run_node():
        await eventually(outbox.is_empty, "set aside")

    assert sum(moved) >= 5 * ROWS_PER_MOVE
    assert max(moved) <= ROWS_PER_MOVE


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
        await eventually(lambda: outbox.are_aside([secret], "access to exchange 'secret'"), "it waits aside")
        rabbitmq.ctl("set_permissions", "-p", vhost, user, ".*", ".*", ".*")
        assert await queue.ids(1) == [secret]


async def test_it_is_tried_though_the_timer_is_over_early(
    outbox: Outbox, channel: AbstractChannel, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    call_at = loop.call_at
    # As with uvloop, which rounds to milliseconds; by more, to be seen.
    monkeypatch.setattr(loop, "call_at", lambda when, *args, **named: call_at(when - 0.05, *args, **named))
    first = await outbox.insert("1", exchange="", routing_key="later")

    async with run_node():
        await eventually(outbox.is_empty, "set aside")
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        assert await later.ids(1) == [first]


async def test_it_outlives_a_restart(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode
) -> None:
    first = await outbox.insert("1", exchange="", routing_key="later")
    async with run_node():
        await eventually(outbox.is_empty, "set aside")
    second = await outbox.insert("1")

    async with run_node():
        await eventually(lambda: outbox.are_aside([first, second]), "both wait")
        await channel.declare_queue("later", durable=True)
        assert await queue.ids(1) == [second]


async def test_a_route_may_have_been_left_and_entered_again_by_others(
    outbox: Outbox, database: DatabaseSettings
) -> None:
    row = await outbox.insert("1", exchange="", routing_key="later")

    async def enter() -> None:
        await outbox.connection.execute("DELETE FROM outbox.quarantine")
        await outbox.connection.execute(
            "WITH route AS (INSERT INTO outbox.quarantine (exchange, routing_key, reason)"
            " VALUES ('', 'later', 'nothing is bound') RETURNING id)"
            " UPDATE outbox.message SET state = 'quarantined', quarantine = (SELECT id FROM route)"
        )

    settings = RelaySettings()
    async with await LaneSession.open(database) as session:
        session.lanes.take(await lock_lanes(session))
        retry = unhurried(session)
        tail, sender = Tail(session, settings, IN_ORDER, retry), Sender(IN_ORDER, settings.max_in_flight)
        gate = Gate(tail, session.lanes, Router([], "outbox").address)
        quarantine = Quarantine(session, tail, gate, sender, policy=IN_ORDER, retry=retry)
        await enter()
        await quarantine.load()
        await enter()
        await quarantine.load()  # as with each lane that is taken
        await quarantine.tend()
        assert await outbox.ids("pending") == [row]  # to be tried


@pytest.mark.parametrize("words", ["waits behind message ", "comes after "])
async def test_an_operator_sends_the_rows_elsewhere_while_the_relay_runs(
    outbox: Outbox,
    channel: AbstractChannel,
    queue: Reader,
    run_node: RunNode,
    database: DatabaseSettings,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
) -> None:
    """A row that only waits behind another keeps its address, whatever the words are that say so."""
    reworded = SET_ASIDE_BEHIND.as_string().replace("waits behind message ", words)
    monkeypatch.setattr(quarantine_table, "SET_ASIDE_BEHIND", SQL(reworded))
    elsewhere = Reader(channel, await channel.declare_queue("elsewhere", durable=True))
    lost, behind = [], []
    for turn in range(3):
        lost += [await outbox.insert(str(key), exchange="", routing_key="gone") for key in range(3)]
        behind += [await outbox.insert(str(key)) for key in range(turn)]  # bound for where all the others go

    def send_elsewhere() -> Changed:
        with session(database) as tables:
            (route,) = list_routes(tables)
            assert route.behind == len(behind)
            where = whereabouts(tables, behind)
            assert all(f"quarantined in route {route.id} behind " in where[row] for row in behind)
            to = {"exchange": "", "routing_key": "elsewhere"}
            return reroute(tables, route, [], **to, by="ada", why="it is gone")

    async with run_node():
        await eventually(outbox.is_empty, "set aside")
        done = await asyncio.to_thread(send_elsewhere)
        lost += [await outbox.insert(str(key), exchange="", routing_key="elsewhere") for key in range(3)]
        assert await in_order(elsewhere, 12) == lost
        assert await in_order(queue, 3) == behind
        await eventually(lambda: is_left(outbox), "the route is forgotten")

    assert (done.rows, done.left_out) == (9, [])
    cursor = await outbox.connection.execute(
        "SELECT FROM (SELECT sent_at < lag(sent_at) OVER (PARTITION BY aggregate_id ORDER BY id) AS overtook"
        " FROM outbox.message) AS row WHERE overtook"
    )
    assert cursor.rowcount == 0


async def test_rows_that_were_sent_elsewhere_unnoticed_go_out_before_later_rows(
    outbox: Outbox,
    channel: AbstractChannel,
    queue: Reader,
    run_node: RunNode,
    database: DatabaseSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The route was released before the relay knew of the new one; a row that came then overtook them."""
    elsewhere = Reader(channel, await channel.declare_queue("elsewhere", durable=True))
    lost = [await outbox.insert(str(key), exchange="", routing_key="gone") for key in range(3)]
    monkeypatch.setattr("relay.operate.routes.quarantine.ring", lambda *_: None)

    def send_elsewhere() -> int:
        with session(database) as tables:
            (route,) = list_routes(tables)
            reroute(tables, route, [], exchange="", routing_key="elsewhere", by="ada", why="it is gone")
            return route.id

    async def is_released(route: int) -> bool:
        cursor = await outbox.connection.execute("SELECT FROM outbox.quarantine WHERE id = %s", [route])
        return cursor.rowcount == 0

    async with run_node():
        await eventually(outbox.is_empty, "set aside")
        route = await asyncio.to_thread(send_elsewhere)
        await eventually(lambda: is_released(route), "the relay has found the route empty")
        lost += [await outbox.insert(str(key), exchange="", routing_key="elsewhere") for key in range(3)]
        assert await in_order(elsewhere, 6) == lost


async def test_rows_behind_a_discarded_one_go_out(
    outbox: Outbox, queue: Reader, run_node: RunNode, database: DatabaseSettings
) -> None:
    lost = await outbox.insert("1", exchange="", routing_key="gone")
    behind = [await outbox.insert("1") for _ in range(3)]

    def give_up() -> Job:
        with session(database) as tables:
            (route,) = list_routes(tables)
            job = order_discard(tables, route, [lost], by="ada", why="too late")
            return run_rows(tables.connection, job)

    async with run_node():
        await eventually(lambda: outbox.are_aside([lost, *behind]), "all wait")
        done = await asyncio.to_thread(give_up)
        assert await in_order(queue, 3) == behind

    assert (done.state, done.done) == ("done", 1)
    assert await outbox.ids("discarded") == [lost]


async def test_a_route_is_tried_at_once_when_an_operator_asks(
    outbox: Outbox,
    channel: AbstractChannel,
    run_node: RunNode,
    database: DatabaseSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.engine.settle.quarantine.backoff", lambda attempt, *_: 0.01 if attempt == 1 else 3600.0)
    row = await outbox.insert("1", exchange="", routing_key="later")

    async def is_tried() -> bool:
        cursor = await outbox.connection.execute("SELECT FROM outbox.quarantine WHERE probes > 0")
        return cursor.rowcount == 1 and await outbox.are_aside([row])

    def ask() -> None:
        with session(database) as tables:
            probe(tables, [route.id for route in list_routes(tables)])

    async with run_node():
        await eventually(is_tried, "it waits for an hour")
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        await asyncio.to_thread(ask)
        assert await later.ids(1) == [row]


async def in_order(reader: Reader, number: int) -> list[int]:
    """Return the ids, of which those of one key must have come in order."""
    of_key: dict[str, list[int]] = {}
    for message in await reader.drain(number):
        of_key.setdefault(str(message.headers["x-aggregate-id"]), []).append(int(str(message.headers["x-outbox-id"])))
    assert list(of_key.values()) == [sorted(ids) for ids in of_key.values()]
    return sorted(id_ for ids in of_key.values() for id_ in ids)


async def is_left(outbox: Outbox) -> bool:
    return await outbox.quarantined_routes() == []


async def test_rows_of_other_routes_go_on_while_many_routes_are_probed(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50 * PROBES_AT_A_TIME):
        await outbox.insert(str(number), exchange="", routing_key=f"gone-{number}")
    async with run_node():
        await eventually(outbox.is_empty, "all wait for their routes", 60)
    probe = QuarantineTable.take_probe
    probes, probes_before = 0, 0

    async def count_and_probe(table: QuarantineTable, route: int, **options: Any) -> Place | None:
        nonlocal probes
        probes += 1
        if probes == 1:
            await outbox.insert("other")
        return await probe(table, route, **options)

    monkeypatch.setattr(QuarantineTable, "take_probe", count_and_probe)
    offer = Sender.offer

    def offer_and_note(sender: Sender, rows: Collection[Row], **options: Any) -> None:
        nonlocal probes_before
        if any(row.aggregate_id == b"other" for row in rows):
            probes_before = probes
        offer(sender, rows, **options)

    monkeypatch.setattr(Sender, "offer", offer_and_note)
    async with run_node():  # after a start all are due at once
        await queue.ids(1)

    assert 0 < probes_before <= 15 * PROBES_AT_A_TIME


@pytest.mark.parametrize(
    ("unroutable", "state"), [(Unroutable.SENT, "sent"), (Unroutable.DISCARD, "discarded")], ids=["sent", "discard"]
)
async def test_a_route_says_what_becomes_of_rows_that_nobody_is_bound_to(
    outbox: Outbox,
    queue: Reader,
    settings: Settings,
    run_node: RunNode,
    unroutable: Unroutable,
    state: str,
) -> None:
    """They hold up no later row of their keys, and a row of another route still waits."""
    unwanted = {"event_type": "Viewed", "exchange": "", "routing_key": "nobody"}
    gone = [await outbox.insert(str(n), **unwanted) for n in range(20)]
    fine = [await outbox.insert(str(n)) for n in range(20)]
    kept = await outbox.insert("kept", exchange="", routing_key="nobody")
    route = Route(event_type="Viewed", exchange="outbox", unroutable=unroutable)

    async with run_node(settings.model_copy(update={"routes": [route]})) as node:
        assert sorted(await queue.ids(20)) == fine
        await eventually(lambda: outbox.are_aside([kept]), "it waits")
        assert node.snapshot().unroutable[unroutable] == len(gone)

    assert set(gone) <= set(await outbox.ids(state))
    assert await outbox.column("attempts", gone[0]) == 0


async def test_rows_in_quarantine_follow_the_route_s_new_word(
    outbox: Outbox, queue: Reader, settings: Settings, run_node: RunNode
) -> None:
    gone = [await outbox.insert("1", event_type="Viewed", exchange="", routing_key="nobody") for _ in range(3)]
    fine = await outbox.insert("1")
    async with run_node():
        await eventually(lambda: outbox.are_aside([*gone, fine]), "they wait")
    route = Route(event_type="Viewed", exchange="outbox", unroutable=Unroutable.DISCARD)

    async with run_node(settings.model_copy(update={"routes": [route]})):
        assert await queue.ids(1) == [fine]

    assert await outbox.ids("discarded") == gone
    assert await outbox.quarantined_routes() == []


async def test_many_routes_are_set_aside_in_few_statements(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)"
        " SELECT 'customer', n::text, 'InvoiceIssued', '1', '', 'gone-' || n FROM generate_series(1, 2000) AS n"
    )
    statements = 0
    set_aside = QuarantineTable.set_aside

    async def count(table: QuarantineTable, *given: Any) -> dict[Address, QuarantineEntry]:
        nonlocal statements
        statements += 1
        return await set_aside(table, *given)

    async def are_all_in_quarantine() -> bool:
        return len(await outbox.quarantined_routes()) == 2000

    monkeypatch.setattr(QuarantineTable, "set_aside", count)
    async with run_node():
        await eventually(are_all_in_quarantine, "each route is in quarantine")
        entered = statements

    assert entered < 500  # one for each route before
