"""A paused route or lane keeps its rows in the table, in order; the others go on, and a resume lets them go."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from aio_pika.abc import AbstractChannel
from pamqp.common import FieldTable
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings, KeyPolicy, Ordering, RelaySettings
from relay.engine.node import Node
from relay.engine.nodes import membership
from relay.engine.nodes.lanes import lock_lanes
from relay.engine.read.tail import Tail
from relay.engine.row import Outcome, Place
from relay.engine.send import refusals
from relay.engine.session.session import LaneSession
from relay.engine.settle import quarantine
from relay.engine.settle.put_away import PutAway
from relay.engine.settle.quarantine_table import Left, QuarantineTable
from relay.operate import lanes
from relay.operate.lanes import LaneStatus
from relay.operate.routes.pause import pause_route, resume_route
from relay.operate.routes.quarantine import RouteStatus, list_routes
from relay.operate.session import session
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.follower import IN_ORDER, unhurried
from tests.faults.victim import relay_victim
from tests.support.events import times
from tests.support.eventually import eventually

WHY = {"by": "ada", "why": "billing is restored"}
WORDS = "paused by ada: billing is restored"
KEYS = 40


class Operator:
    """Pauses and resumes, as the commands do."""

    def __init__(self, database: DatabaseSettings) -> None:
        self._database = database

    async def pause(self, routing_key: str, exchange: str = "") -> RouteStatus:
        def pause() -> RouteStatus:
            with session(self._database) as tables:
                return pause_route(tables, exchange, routing_key, **WHY)

        return await asyncio.to_thread(pause)

    async def resume(self, route: int) -> RouteStatus:
        def resume() -> RouteStatus:
            with session(self._database) as tables:
                return resume_route(tables, route, **WHY)

        return await asyncio.to_thread(resume)

    async def routes(self) -> list[RouteStatus]:
        def read() -> list[RouteStatus]:
            with session(self._database) as tables:
                return list_routes(tables)

        return await asyncio.to_thread(read)

    async def pause_lane(self, lane: int) -> LaneStatus:
        return await asyncio.to_thread(self._change_lane, lanes.pause_lane, lane)

    async def resume_lane(self, lane: int) -> LaneStatus:
        return await asyncio.to_thread(self._change_lane, lanes.resume_lane, lane)

    async def lanes(self) -> list[LaneStatus]:
        def read() -> list[LaneStatus]:
            with session(self._database) as tables:
                return lanes.list_lanes(tables)

        return await asyncio.to_thread(read)

    def _change_lane(self, change: Callable[..., LaneStatus], lane: int) -> LaneStatus:
        with session(self._database) as tables:
            return change(tables, lane, **WHY)


@pytest.fixture
def operator(database: DatabaseSettings) -> Operator:
    return Operator(database)


@pytest.fixture
async def later(channel: AbstractChannel) -> Reader:
    """A queue that the default exchange addresses."""
    return Reader(channel, await channel.declare_queue("later", durable=True))


async def write(outbox: Outbox, number: int, keys: int = KEYS) -> list[int]:
    """Write rows for the queue `later`."""
    cursor = await outbox.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)"
        " SELECT 'customer', (n %% %s)::text, 'InvoiceIssued', '1', '', 'later' FROM generate_series(1, %s) AS n"
        " RETURNING id",
        [keys, number],
    )
    return sorted([row[0] for row in await cursor.fetchall()])


async def assert_once_and_in_order(reader: Reader, ids: list[int]) -> None:
    """See that just these have come, once each, those of one key in order."""
    messages = await reader.drain(len(ids))
    sent = [(str(message.headers["x-aggregate-id"]), int(str(message.headers["x-outbox-id"]))) for message in messages]
    assert sorted(id_ for _, id_ in sent) == sorted(ids)
    for _, group in groupby(sorted(sent, key=itemgetter(0)), itemgetter(0)):
        of_key = [id_ for _, id_ in group]
        assert of_key == sorted(of_key)


def has_paused(outbox: Outbox, number: int) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return len(await outbox.ids("quarantined")) == number and await outbox.is_empty()

    return look


@pytest.mark.parametrize(
    ("ordering", "key_policy"),
    [(Ordering.KEY, KeyPolicy.HOLD), (Ordering.PIPELINED, KeyPolicy.HOLD), (Ordering.PIPELINED, KeyPolicy.SKIP)],
)
async def test_rows_of_a_paused_route_wait_and_follow_in_order(
    outbox: Outbox,
    queue: Reader,
    later: Reader,
    run_node: RunNode,
    operator: Operator,
    ordering: Ordering,
    key_policy: KeyPolicy,
) -> None:
    async with run_node(ordering=ordering, key_policy=key_policy):
        first = await write(outbox, 40)
        await assert_once_and_in_order(later, first)
        with capture_logs() as events:
            route = await operator.pause("later")
            await eventually(lambda: times(events, "route.paused") == 1, "the relay has heard of it")
        lost = await write(outbox, 500)
        fine = [await outbox.insert(f"fine-{n}") for n in range(20)]
        assert sorted(await queue.ids(20)) == fine
        await eventually(has_paused(outbox, 500), "they wait")
        (seen,) = await operator.routes()
        await operator.resume(route.id)
        lost += await write(outbox, 200)
        if key_policy is KeyPolicy.SKIP:
            assert sorted(await later.ids(700)) == lost
        else:
            await assert_once_and_in_order(later, lost)
        await eventually(outbox.is_at_rest, "marked")
        await eventually(lambda: no_route(outbox), "the route is forgotten")

    assert (seen.reason, seen.rows, seen.probes, seen.next_probe_by) == (WORDS, 500, 0, None)
    assert (seen.paused_by, seen.paused_why) == ("ada", "billing is restored")
    assert seen.paused_at is not None


async def no_route(outbox: Outbox) -> bool:
    return await outbox.quarantined_routes() == []


async def test_rows_that_wait_in_memory_are_set_aside_too(
    outbox: Outbox, channel: AbstractChannel, run_node: RunNode, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "LOAD_INTERVAL", 0.05)
    monkeypatch.setattr(refusals, "LASTING_AFTER", 3600.0)  # it is the pause that sets them aside
    full: FieldTable = {"x-max-length": 1, "x-overflow": "reject-publish"}
    narrow = Reader(channel, await channel.declare_queue("narrow", durable=True, arguments=full))
    address = {"exchange": "", "routing_key": "narrow"}
    first, *others = [await outbox.insert("1", **address) for _ in range(30)]

    async with run_node() as node:
        await eventually(
            lambda: is_refused(outbox, node, [first]), "the queue is full, and the next row is tried again"
        )
        route = await operator.pause("narrow")
        await eventually(has_paused(outbox, 29), "that row, and those behind it, are set aside")
        await operator.resume(route.id)
        await assert_once_and_in_order(narrow, [first, *others])


async def is_refused(outbox: Outbox, node: Node, sent: list[int]) -> bool:
    return node.snapshot().failures[Outcome.NACKED] > 0 and await outbox.ids("sent") == sent


async def test_rows_of_the_key_wait_behind_a_paused_route(
    outbox: Outbox, queue: Reader, later: Reader, run_node: RunNode, operator: Operator
) -> None:
    route = await operator.pause("later")
    first = await outbox.insert("1", exchange="", routing_key="later")
    behind = await outbox.insert("1")

    async with run_node():
        await eventually(has_paused(outbox, 2), "both wait")
        await operator.resume(route.id)
        assert await queue.ids(1) == [behind]
        assert await later.ids(1) == [first]

    assert await outbox.column("sent_at", first) <= await outbox.column("sent_at", behind)


async def test_an_empty_paused_route_outlives_restarts_and_goes_with_its_pause(
    outbox: Outbox, later: Reader, run_node: RunNode, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "LOAD_INTERVAL", 0.05)
    route = await operator.pause("later")
    for _ in range(2):
        async with run_node() as node:
            await eventually(lambda: node.snapshot().ready, "it works")
            assert await outbox.quarantined_routes() == [("", "later")]

    async with run_node():
        (row,) = await write(outbox, 1)
        await eventually(has_paused(outbox, 1), "it waits")
        await operator.resume(route.id)
        assert await later.ids(1) == [row]
        await eventually(lambda: no_route(outbox), "the route is forgotten")
        again = await operator.pause("later")
        await operator.resume(again.id)
        await eventually(lambda: no_route(outbox), "nothing waited for it")


async def test_two_nodes_obey(outbox: Outbox, later: Reader, run_node: RunNode, operator: Operator) -> None:
    async with run_node(node="a") as a, run_node(node="b") as b:
        await eventually(lambda: (a.snapshot().lanes, b.snapshot().lanes) == (8, 8), "they share the lanes")
        with capture_logs() as events:
            route = await operator.pause("later")
            await eventually(lambda: times(events, "route.paused") == 2, "both have heard of it")
        written = await write(outbox, 1000)
        await eventually(has_paused(outbox, 1000), "they wait")
        await operator.resume(route.id)
        written += await write(outbox, 1000)
        await assert_once_and_in_order(later, written)
        await eventually(lambda: no_route(outbox), "the route is forgotten")


async def test_a_route_that_does_not_work_is_not_probed_while_it_is_paused(
    outbox: Outbox, channel: AbstractChannel, run_node: RunNode, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "LOAD_INTERVAL", 0.05)
    monkeypatch.setattr(quarantine, "PROBE_MAX", 0.1)
    take_probe, probed = QuarantineTable.take_probe, []
    row = await outbox.insert("1", exchange="", routing_key="later")

    async def note(table: QuarantineTable, route: int, **options: Any) -> Place | None:
        probed.append(route)
        return await take_probe(table, route, **options)

    async with run_node():
        await eventually(lambda: outbox.are_aside([row], "312 NO_ROUTE"), "it is set aside")
        paused = await operator.pause("later")
        await eventually(lambda: outbox.are_aside([row], "312 NO_ROUTE"), "no probe is on its way")
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        fine = await outbox.insert("2", exchange="", routing_key="fine")
        await eventually(lambda: tried(operator, "fine", 1), "the relay has read the routes since")
        monkeypatch.setattr(QuarantineTable, "take_probe", note)
        await eventually(lambda: tried(operator, "fine", 5), "the relay probes the other route")
        assert paused.id not in probed
        assert row in await outbox.ids("quarantined")
        await operator.resume(paused.id)
        assert await later.ids(1) == [row]

    assert paused.reason.startswith("312 NO_ROUTE")
    assert await outbox.ids("quarantined") in ([fine], [])


async def tried(operator: Operator, routing_key: str, times: int) -> bool:
    return any(each.routing_key == routing_key and each.probes >= times for each in await operator.routes())


async def test_a_route_that_does_not_work_stays_in_quarantine_after_its_pause(
    outbox: Outbox, run_node: RunNode, operator: Operator
) -> None:
    route = await operator.pause("nowhere")
    row = await outbox.insert("1", exchange="", routing_key="nowhere")

    async with run_node():
        await eventually(has_paused(outbox, 1), "it waits")
        resumed = await operator.resume(route.id)
        await eventually(lambda: outbox.are_aside([row], "312 NO_ROUTE"), "it was tried")
        (seen,) = await operator.routes()

    assert resumed.reason == "was paused; resumed by ada"
    assert seen.paused_at is None
    assert seen.reason.startswith("312 NO_ROUTE")


async def lane_of(outbox: Outbox, key: str) -> int:
    cursor = await outbox.connection.execute("SELECT hashtextextended('customer/' || %s, 0) & 15", [key])
    (lane,) = await cursor.fetchone() or (0,)
    return int(lane)


async def test_rows_of_a_paused_lane_stay_pending_while_the_others_go(
    outbox: Outbox, queue: Reader, run_node: RunNode, operator: Operator
) -> None:
    lane = await lane_of(outbox, "0")
    others = await outbox.keys_of_other_lanes()

    async with run_node(node="a") as a, AsyncExitStack() as later:
        await eventually(lambda: a.snapshot().lanes == 16, "it has all lanes")
        await operator.pause_lane(lane)
        await eventually(lambda: a.snapshot().lanes == 15, "it gives the lane up")
        waiting = [await outbox.insert("0") for _ in range(50)]
        fine = [await outbox.insert(key) for key in others]
        assert sorted(await queue.ids(len(fine))) == fine
        b = await later.enter_async_context(run_node(node="b"))
        spare = await later.enter_async_context(run_node(node="spare", standby=True))
        nodes = (a, b, spare)
        await eventually(lambda: [node.snapshot().lanes for node in nodes] == [8, 7, 0], "they share the others")
        assert await outbox.ids("pending") == waiting
        (paused,) = [each for each in await operator.lanes() if each.paused_at]
        await operator.resume_lane(lane)
        assert await queue.ids(50) == waiting
        await eventually(lambda: [node.snapshot().lanes for node in nodes] == [8, 8, 0], "they share all")

    assert (paused.lane, paused.node, paused.paused_by, paused.paused_why) == (lane, None, *WHY.values())


@pytest.mark.parametrize("ordering", Ordering)
async def test_under_load_a_pause_of_a_lane_neither_loses_nor_doubles_nor_reorders(
    outbox: Outbox, queue: Reader, run_node: RunNode, operator: Operator, ordering: Ordering
) -> None:
    written = 0
    async with run_node(node="a", ordering=ordering), run_node(node="b", ordering=ordering):
        for turn in range(8):
            lane = turn % 4
            for part in range(3):
                await outbox.insert_many(200, keys=KEYS)
                written += 200
                if part == 1:
                    await (operator.pause_lane(lane) if turn < 4 else operator.resume_lane(lane))
        await eventually(outbox.is_empty, "every row marked")
        ids = await outbox.ids("sent")

    assert len(ids) == written
    await assert_once_and_in_order(queue, ids)


async def test_rows_in_quarantine_of_a_paused_lane_stay_there_and_the_route_works_on(
    outbox: Outbox, channel: AbstractChannel, run_node: RunNode, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    let_go = QuarantineTable.let_go

    async def count(table: QuarantineTable, routes: Sequence[int], rows: int) -> object:
        nonlocal asked
        asked += 1
        return await let_go(table, routes, rows)

    lane, other = await lane_of(outbox, "0"), (await outbox.keys_of_other_lanes())[0]
    waits = await outbox.insert("0", exchange="", routing_key="later")
    goes = await outbox.insert(other, exchange="", routing_key="later")
    async with run_node() as node:
        await eventually(lambda: outbox.are_aside([waits, goes], "312 NO_ROUTE"), "both are set aside")
        await operator.pause_lane(lane)
        await eventually(lambda: node.snapshot().lanes == 15, "it gives the lane up")
        await eventually(lambda: outbox.are_aside([waits, goes], "312 NO_ROUTE"), "both are there again")
        later = Reader(channel, await channel.declare_queue("later", durable=True))
        assert await later.ids(1) == [goes]
        monkeypatch.setattr(QuarantineTable, "let_go", count)
        more = [await outbox.insert(other, exchange="", routing_key="later") for _ in range(20)]
        assert await later.ids(20) == more
        assert await outbox.ids("quarantined") == [waits]
        await operator.resume_lane(lane)
        assert await later.ids(1) == [waits]
        await eventually(lambda: no_route(outbox), "the route is forgotten")

    assert asked < 20  # without a pause between two looks it would be thousands


async def test_a_node_says_that_every_lane_is_paused(
    outbox: Outbox, queue: Reader, run_node: RunNode, operator: Operator
) -> None:
    for lane in range(16):
        await operator.pause_lane(lane)
    row = await outbox.insert()

    async with run_node() as node:
        await eventually(lambda: "paused them all" in node.hindrances().get("lanes", ""), "it says why it stands by")
        for lane in range(16):
            await operator.resume_lane(lane)
        assert await queue.ids(1) == [row]


async def test_counts_are_cleared_while_the_first_lane_is_paused(
    outbox: Outbox, queue: Reader, run_node: RunNode, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "CLEAR_INTERVAL", 0.05)
    await operator.pause_lane(0)

    async def is_clear() -> bool:
        return (await outbox.connection.execute("SELECT FROM outbox.published")).rowcount == 0

    async with run_node() as node:
        await outbox.insert_many(160, keys=160)
        await eventually(lambda: node.snapshot().published > 100, "it has marked")
        await eventually(is_clear, "the counts are added and gone")


async def test_a_paused_lane_is_not_locked(outbox: Outbox, database: DatabaseSettings, operator: Operator) -> None:
    await operator.pause_lane(7)

    async with await LaneSession.open(database) as lane_session:
        taken = await lock_lanes(lane_session)
        cursor = await outbox.connection.execute(
            "SELECT objid::integer FROM pg_locks WHERE locktype = 'advisory' AND pid = %s ORDER BY 1",
            [lane_session.pid],
        )
        locked = [lane for (lane,) in await cursor.fetchall()]

    assert taken == locked == [lane for lane in range(16) if lane != 7]


async def test_a_pause_that_the_relay_has_not_heard_of_is_obeyed_in_the_table(
    outbox: Outbox, database: DatabaseSettings
) -> None:
    row = await outbox.insert("1", exchange="", routing_key="later")
    await outbox.connection.execute(
        "WITH route AS (INSERT INTO outbox.quarantine (exchange, routing_key, reason)"
        " VALUES ('', 'later', 'nothing is bound') RETURNING id)"
        " UPDATE outbox.message SET state = 'quarantined', quarantine = (SELECT id FROM route)"
    )
    async with await LaneSession.open(database) as lane_session:
        lane_session.lanes.take(await lock_lanes(lane_session))
        retry = unhurried(lane_session)
        tail = Tail(lane_session, RelaySettings(), IN_ORDER, retry)
        table = QuarantineTable(lane_session, retry, PutAway(lane_session, tail, retry))
        ((_, entry),) = await table.routes()
        await outbox.connection.execute("UPDATE outbox.quarantine SET paused_at = now()")

        probe = await table.take_probe(entry.id, but=(), holding=True, last=False)
        gone = await table.let_go([entry.id], 10)

    assert probe is None
    assert gone == ([], {entry.id: Left.PAUSE})
    assert await outbox.ids("quarantined") == [row]
    assert await outbox.quarantined_routes() == [("", "later")]


@pytest.mark.drills
async def test_a_kill_while_paused_loses_nothing_and_keeps_the_order(
    outbox: Outbox,
    queue: Reader,
    later: Reader,
    operator: Operator,
    database_url: str,
    broker_url: str,
    tmp_path: Path,
) -> None:
    """The relay is killed while a route and a lane are paused; after the resume each message comes once, in order."""
    relay = relay_victim(database_url, broker_url, tmp_path)
    lane = await lane_of(outbox, "0")
    await relay.start()
    try:
        route = await operator.pause("later")
        await operator.pause_lane(lane)
        await eventually(lambda: is_given_up(operator, lane), "the relay obeys")
        aside = await write(outbox, 2000)
        await outbox.insert_many(2000, keys=KEYS)
        await eventually(lambda: only_waits(outbox, lane), "all that may go is sent")
        await asyncio.to_thread(relay.stop, signal.SIGKILL)
        aside += await write(outbox, 500)
        await relay.start()
        aside += await write(outbox, 500)
        await eventually(lambda: only_waits(outbox, lane), "the new one obeys, too")
        assert await operator.lanes() != []
        (still,) = await operator.routes()
        await operator.resume(route.id)
        await operator.resume_lane(lane)
        await assert_once_and_in_order(later, aside)
        await eventually(outbox.is_at_rest, "marked")
        others = [id_ for id_ in await outbox.ids("sent") if id_ not in set(aside)]
        await assert_once_and_in_order(queue, others)
        assert relay.stop(signal.SIGTERM) == 0
    finally:
        relay.stop(signal.SIGKILL)

    assert still.paused_at is not None
    assert len(others) == 2000


async def is_given_up(operator: Operator, lane: int) -> bool:
    return (await operator.lanes())[lane].node is None


async def only_waits(outbox: Outbox, lane: int) -> bool:
    """Whether nothing is pending but in the paused lane."""
    statement = "SELECT FROM outbox.message_pending WHERE lane <> %s LIMIT 1"
    return (await outbox.connection.execute(statement, [lane])).rowcount == 0
