"""After one route of an exchange works, the others leave the quarantine in rounds that double, in order per key."""

import asyncio
from collections.abc import Sequence

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractExchange
from structlog.testing import capture_logs

from relay.engine.row import Address, Place
from relay.engine.settle.quarantine_table import Left, QuarantineTable
from relay.engine.settle.release import ROUND_WITHIN, ROUTES_PER_ROUND, Agenda, Trust
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.engine.rows import ROW
from tests.support.events import named
from tests.support.eventually import eventually

ROUTES, KEYS = 2000, 500

# The rows of a key wait for as many routes as it has rows, but for those behind an earlier row of the key.
WRITE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)
    SELECT 'order', (n %% %s)::text, 'OrderPlaced', '1', 'orders', 'order.' || n FROM generate_series(1, %s) AS n
"""
WRITE_FOR_TWO = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, routing_key)
    SELECT 'order', %(keys)s::text || '/' || n %% %(keys)s, 'OrderPlaced', '1', 'orders',
        CASE WHEN n %% 2 = 0 THEN 'late.' ELSE 'order.' END || n %% 40
    FROM generate_series(%(first)s::integer, %(last)s) AS n
"""
OF_TWO = """
    SELECT aggregate_id FROM outbox.message JOIN outbox.quarantine ON quarantine.id = quarantine
    GROUP BY aggregate_id HAVING count(DISTINCT left(message.routing_key, 4)) = 2 AND count(DISTINCT quarantine) > 1
"""
MAY_GO = """
    SELECT count(*) FROM outbox.message AS row
    WHERE NOT EXISTS (
        SELECT FROM outbox.message AS ahead
        WHERE ahead.aggregate_id = row.aggregate_id AND ahead.id <= row.id AND ahead.routing_key LIKE 'late.%'
    )
"""
WAITING = "SELECT count(*) FROM outbox.message WHERE state = 'quarantined'"
PAUSE = "UPDATE outbox.quarantine SET paused_at = now() WHERE routing_key = %s"
SENT_BEFORE = """
    SELECT count(*) FROM outbox.message
    WHERE aggregate_type <> 'order'
        AND sent_at < (SELECT max(sent_at) FROM outbox.message WHERE aggregate_type = 'order')
"""


@pytest.fixture
async def orders(channel: AbstractChannel) -> AbstractExchange:
    return await channel.declare_exchange("orders", aio_pika.ExchangeType.TOPIC, durable=True)


@pytest.fixture
async def later(channel: AbstractChannel) -> Reader:
    return Reader(channel, await channel.declare_queue("later", durable=True))


async def are_waiting(outbox: Outbox, rows: int) -> bool:
    """Whether so many rows wait; one of them may be on its way as a probe."""
    found = await (await outbox.connection.execute(WAITING)).fetchone()
    return found is not None and found[0] >= rows - 1


async def test_many_routes_leave_in_few_statements_and_lines_while_others_pass(
    outbox: Outbox,
    queue: Reader,
    later: Reader,
    orders: AbstractExchange,
    run_node: RunNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lost binding of 2,000 routing keys comes back; rows of one key wait for several of them, and stay in order."""
    let_go, released = QuarantineTable.let_go, list[int]()
    others: list[int] = []

    async def count(table: QuarantineTable, routes: Sequence[int], rows: int) -> tuple[list[Place], dict[int, Left]]:
        released.append(len(routes))
        others.append(await outbox.insert(f"other {len(others)}"))
        return await let_go(table, routes, rows)

    def logged(event: str) -> int:
        return sum(1 + each.get("more", 0) for each in named(events, event))

    monkeypatch.setattr(QuarantineTable, "let_go", count)
    with capture_logs() as events:
        async with run_node(**NO_SWEEP) as node:
            await outbox.connection.execute(WRITE, [KEYS, ROUTES])
            await eventually(lambda: are_waiting(outbox, ROUTES), "all wait", 60)
            began = asyncio.get_running_loop().time()
            entered = len(await outbox.quarantined_routes())
            await later.queue.bind(orders, "order.#")
            await eventually(outbox.is_at_rest, "all are sent", 60)
            await eventually(lambda: logged("route.released") >= entered, "the last line is written")
            took = asyncio.get_running_loop().time() - began
            assert node.snapshot().sweep_finds == 0

    assert max(released) <= ROUTES_PER_ROUND
    assert sum(size > 1 for size in released) < 40  # rounds; one statement for each route before
    assert len(named(events, "route.released")) <= took + 1
    passed = await (await outbox.connection.execute(SENT_BEFORE)).fetchone()
    assert passed is not None
    assert passed[0] > len(others) // 2
    assert await outbox.quarantined_routes() == []
    await check_order(later, ROUTES)


async def test_rows_of_one_key_that_wait_for_two_routes_follow_in_order(
    outbox: Outbox, queue: Reader, later: Reader, orders: AbstractExchange, run_node: RunNode
) -> None:
    async with run_node(**NO_SWEEP) as node:
        await outbox.connection.execute(WRITE_FOR_TWO, {"first": 1, "last": 40, "keys": 40})
        await eventually(lambda: are_waiting(outbox, 40), "the routes are known")
        await outbox.connection.execute(WRITE_FOR_TWO, {"first": 41, "last": 640, "keys": 29})
        await eventually(lambda: are_waiting(outbox, 640), "all wait, each for its own route")
        assert (await outbox.connection.execute(OF_TWO)).rowcount == 29

        await later.queue.bind(orders, "order.#")
        await eventually(lambda: has_sent_what_may_go(outbox), "the rows before the first late one of their key go")
        await later.queue.bind(orders, "late.#")
        await eventually(outbox.is_at_rest, "all are sent", 60)
        assert node.snapshot().sweep_finds == 0

    await check_order(later, 640)


async def has_sent_what_may_go(outbox: Outbox) -> bool:
    cursor = await outbox.connection.execute(MAY_GO)
    (may_go,) = await cursor.fetchone() or (0,)
    return len(await outbox.ids("sent")) == int(may_go)


async def check_order(reader: Reader, number: int) -> None:
    """Check that all have arrived, those of each key for the first time in the order of their ids."""
    firsts: dict[str, dict[int, None]] = {}
    for message in await reader.drain_different(number):
        id_ = int(str(message.headers["x-outbox-id"]))
        firsts.setdefault(str(message.headers["x-aggregate-id"]), {}).setdefault(id_)
    assert [list(ids) for ids in firsts.values()] == [sorted(ids) for ids in firsts.values()]
    assert sum(map(len, firsts.values())) == number


async def test_one_repaired_route_brings_few_others_out_of_quarantine(
    outbox: Outbox,
    queue: Reader,
    later: Reader,
    orders: AbstractExchange,
    run_node: RunNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go, released = QuarantineTable.let_go, list[int]()

    async def count(table: QuarantineTable, routes: Sequence[int], rows: int) -> tuple[list[Place], dict[int, Left]]:
        gone, left = await let_go(table, routes, rows)
        released.append(len(gone))
        return gone, left

    async with run_node():
        await outbox.connection.execute(WRITE, [40, 40])
        await eventually(lambda: are_waiting(outbox, 40), "all wait")
        monkeypatch.setattr(QuarantineTable, "let_go", count)
        await later.queue.bind(orders, "order.7")
        (sent,) = await later.ids(1)
        others = [id_ for id_ in range(sent - 6, sent + 34) if id_ != sent]
        await eventually(lambda: outbox.are_aside(others, "NO_ROUTE"), "all others wait again")

    assert sum(released) <= 2


async def test_a_paused_route_does_not_leave_with_the_others(
    outbox: Outbox, queue: Reader, later: Reader, orders: AbstractExchange, run_node: RunNode
) -> None:
    async with run_node():
        await outbox.connection.execute(WRITE, [30, 30])
        await eventually(lambda: are_waiting(outbox, 30), "all wait")
    await outbox.connection.execute(PAUSE, ["order.7"])
    await later.queue.bind(orders, "order.#")

    async with run_node():
        await later.ids(29)
        await eventually(lambda: has_one_route(outbox), "the others have left")

    assert await outbox.quarantined_routes() == [("orders", "order.7")]


async def has_one_route(outbox: Outbox) -> bool:
    return len(await outbox.quarantined_routes()) == 1


def address(routing_key: str, exchange: str = "orders") -> Address:
    return Address(exchange.encode(), routing_key.encode())


def routes(number: int) -> dict[Address, bool]:
    return {address(f"order.{n}"): True for n in range(number)}


def go(trust: Trust, waiting: dict[Address, bool], now: float = 0.0) -> list[Place]:
    """Let the next round go, with one row for each route."""
    chosen = trust.next_round(now, waiting)
    places = [(0, int(each.routing_key.rpartition(b".")[2])) for each in chosen]
    if chosen:
        trust.go(chosen, places, now)
    for each in chosen:
        del waiting[each]
    return places


def confirm(trust: Trust, places: list[Place]) -> bool:
    return trust.note_sent([ROW._replace(lane=lane, id=id_) for lane, id_ in places])


def test_rounds_double_up_to_a_limit() -> None:
    trust, waiting = Trust(), routes(1000)
    trust.begin(address("order.x"))
    sizes: list[int] = []

    while places := go(trust, waiting):
        sizes.append(len(places))
        assert confirm(trust, places)

    assert sizes == [2, 4, 8, 16, 32, 64, 128, *[ROUTES_PER_ROUND] * 2, 1000 - 254 - 2 * ROUTES_PER_ROUND]
    assert not trust


def test_no_round_begins_before_the_last_is_taken() -> None:
    trust, waiting = Trust(), routes(10)
    trust.begin(address("order.x"))
    places = go(trust, waiting)

    assert not confirm(trust, places[:1])
    assert go(trust, waiting) == []
    assert confirm(trust, places[1:])
    assert len(go(trust, waiting)) == 4


def test_a_row_that_comes_back_ends_the_trust_until_the_next_probe() -> None:
    trust, waiting = Trust(), routes(10)
    trust.begin(address("order.x"))
    confirm(trust, go(trust, waiting))
    (lane, id_), *_ = go(trust, waiting)

    trust.note_returned([ROW._replace(lane=lane, id=id_)])

    assert not trust
    trust.begin(address("order.x"))
    assert len(go(trust, waiting)) == 2


def test_a_round_that_takes_too_long_ends_the_trust() -> None:
    trust, waiting = Trust(), routes(10)
    trust.begin(address("order.x"))
    go(trust, waiting)

    assert trust.next_at == ROUND_WITHIN
    assert go(trust, waiting, now=ROUND_WITHIN) == []
    assert not trust


def test_routes_that_begin_with_the_same_word_go_first_and_paused_ones_never() -> None:
    trust = Trust()
    trust.begin(address("order.x"))
    other, paused, alike = address("invoice.1"), address("order.1"), address("order.2")

    chosen = trust.next_round(0.0, {other: True, paused: False, alike: True, address("order.3", "others"): True})

    assert chosen == [alike, other]


def test_the_last_moment_of_an_address_counts() -> None:
    agenda = Agenda()
    agenda.put(address("a"), 1.0)
    agenda.put(address("b"), 2.0)
    agenda.put(address("a"), 3.0)
    agenda.put(address("c"), 2.0)
    agenda.drop(address("c"))

    assert agenda.next_at == 2.0
    assert agenda.take(10.0, most=1) == [address("b")]
    assert agenda.take(2.5, most=9) == []
    assert agenda.take(3.0, most=9) == [address("a")]
