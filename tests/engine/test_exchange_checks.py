"""Once an exchange has closed the channel that all rows share, one row tries each on a channel of its own."""

import asyncio
from collections import Counter
from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from aio_pika.abc import AbstractChannel
from hypothesis import given

from relay.config.settings import Ordering, Wire
from relay.engine.row import Outcome, Row, Settled
from relay.engine.send import exchange_checks
from relay.engine.send.broker_link import BrokerLink, Verdict
from relay.engine.send.exchange_checks import ExchangeChecks
from relay.engine.send.frames import Encoder
from relay.engine.send.message import Identity
from relay.engine.send.probe import Prober
from relay.engine.send.routes import Router
from relay.engine.send.wire import Settle
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.test_frames import ROW
from tests.support.eventually import eventually
from tests.support.rabbitmq import RabbitServer

ROUTER = Router((), "outbox")
MISSING = "NOT_FOUND - no exchange '{}' in vhost '/'"


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """How each channel that all rows share has ended."""
    verdicts: list[Verdict] = []
    publish = BrokerLink._publish

    async def note(*args: object) -> Verdict:
        verdict = await publish(*args)  # type: ignore[arg-type]
        verdicts.append(verdict)
        return verdict

    monkeypatch.setattr(BrokerLink, "_publish", note)
    return verdicts


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("ordering", Ordering)
async def test_many_missing_exchanges_close_the_shared_channel_once(
    outbox: Outbox, queue: Reader, run_node: RunNode, closed: list[Verdict], wire: Wire, ordering: Ordering
) -> None:
    """Each of them closed it: with a hundred of them one good row arrived 85 times."""
    odd, fine = [], []
    async with outbox.connection.transaction():
        for n in range(60):
            odd.append(await outbox.insert(f"odd-{n}", exchange=f"missing-{n}"))
            fine.append(await outbox.insert(f"fine-{n % 20}"))

    async with run_node(wire=wire, ordering=ordering) as node:
        await eventually(outbox.is_empty, "nothing pending")
        await eventually(lambda: outbox.are_aside(odd), "they wait for their exchanges")
        assert node.snapshot().broker_losses == {}
        assert closed == [Verdict.CLOSED]

    arrived = Counter(int(str(message.headers["x-outbox-id"])) for message in await queue.everything())
    assert set(arrived) == set(fine)
    assert max(arrived.values()) <= 2  # what was in flight as the channel closed
    assert await outbox.ids("sent") == fine


async def test_topics_that_are_forbidden_close_it_once(
    outbox: Outbox, queue: Reader, run_node: RunNode, rabbitmq: RabbitServer, broker_url: str, closed: list[Verdict]
) -> None:
    vhost, user = broker_url.rpartition("/")[2], broker_url.partition("//")[2].partition(":")[0]
    rabbitmq.ctl("set_topic_permissions", "-p", vhost, user, "outbox", "^customer", ".*")
    odd, fine = [], []
    async with outbox.connection.transaction():
        for n in range(20):
            odd.append(await outbox.insert(f"odd-{n}", routing_key=f"secret.{n}"))
            fine.append(await outbox.insert(f"fine-{n}"))

    async with run_node():
        await eventually(outbox.is_empty, "nothing pending")
        await eventually(lambda: outbox.are_aside(odd, "access to topic"), "they wait aside")
        assert closed == [Verdict.CLOSED]

    assert set(await outbox.ids("sent")) == set(fine)


async def test_after_a_while_rows_are_sent_untried_again(
    outbox: Outbox, queue: Reader, run_node: RunNode, closed: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_checks, "QUIET_AFTER", 0.0)
    ended: list[bool] = []
    end_if_quiet = ExchangeChecks.end_if_quiet

    def note(checks: ExchangeChecks) -> bool:
        if is_quiet := end_if_quiet(checks):
            ended.append(True)
        return is_quiet

    monkeypatch.setattr(ExchangeChecks, "end_if_quiet", note)
    async with run_node():
        for n in (1, 2):
            await outbox.insert(f"odd-{n}", exchange=f"missing-{n}")
            await eventually(lambda n=n: len(ended) == n, "rows are sent untried")
            fine = await outbox.insert("fine")
            assert await queue.ids(1) == [fine]

    assert len(closed) >= 2


async def test_a_row_that_makes_no_message_tries_no_exchange(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    send = Prober.send

    def note(prober: Prober, row: Row, **how: object) -> None:
        tried.append(row.id)
        send(prober, row, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Prober, "send", note)
    async with run_node():
        await outbox.insert("odd", exchange="missing")
        await eventually(outbox.is_empty, "set aside")
        faulty = [await outbox.insert_faulty(f"faulty-{n}") for n in range(20)]
        fine = await outbox.insert("fine")
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == faulty
    assert await queue.ids(1) == [fine]
    assert set(tried).isdisjoint(faulty)


class World:
    """Stands in for the prober and the wire; exchange `e0` is missing."""

    def __init__(self) -> None:
        self.left: list[Row] = []  # in the order in which they got to the broker
        self.settled: list[Row] = []
        self.on_wire: list[Row] = []
        self.trying: list[tuple[Row, Settle]] = []
        self.waiting = 0
        self.checks = ExchangeChecks(ROUTER, self, self.settle)  # type: ignore[arg-type]

    def send(self, rows: Iterable[Row] | Row, *_: object, settle: Settle | None = None, **__: object) -> None:
        if settle is not None:
            self.trying.append((rows, settle))  # type: ignore[arg-type]
        else:
            self.on_wire += rows  # type: ignore[arg-type]

    def settle(self, settled: Settled) -> None:
        self.settled += settled.rows

    def confirm(self) -> None:
        """Let what is on the wire get there, later than what others send."""
        while self.on_wire:
            row = self.on_wire.pop(0)
            self.left.append(row)
            self.checks.note(Settled((row,), Outcome.CONFIRMED))

    def end(self, which: int, *, lost: bool) -> None:
        row, settle = self.trying.pop(which % len(self.trying))
        exchange = (row.exchange or b"").decode()
        if lost:
            settle(Settled((row,), Outcome.UNKNOWN, "lost"))
        elif exchange == "e0":
            settle(Settled((row,), Outcome.BARRED, MISSING.format(exchange)))
        else:
            self.left.append(row)
            settle(Settled((row,), Outcome.CONFIRMED))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=30),
    st.lists(st.integers(0, 9), max_size=60),
)
def test_rows_of_a_key_leave_in_order_and_none_is_forgotten(rows: list[tuple[int, int]], steps: list[int]) -> None:
    async def run() -> None:
        world = World()
        checks = world.checks
        encoder = Encoder(1, 131_072, ROUTER, Identity(b"outbox-relay", 4096))
        checks.open(world, encoder)
        checks.learn(Settled((ROW._replace(exchange=b"e0"),), Outcome.BARRED, MISSING.format("e0")))
        assert checks.open(world, encoder) is checks
        sent = [
            ROW._replace(id=n, aggregate_id=str(key).encode() if key else None, exchange=b"e%d" % exchange)
            for n, (key, exchange) in enumerate(rows)
        ]
        unsent, is_open = list(sent), True
        for step in steps:
            if step == 9:  # the channel closes, and another one is opened
                world.confirm()
                checks.shut() if is_open else checks.open(world, encoder)
                is_open = not is_open
            elif step < 4 and unsent and is_open:
                checks.send([unsent.pop(0)], set())
            elif step == 8:
                world.confirm()
            elif world.trying:
                world.end(step, lost=False)
        checks.open(world, encoder)
        checks.send(unsent, set())
        world.confirm()
        while world.trying:
            world.end(0, lost=False)
            world.confirm()

        assert checks.waiting == 0
        ids = [row.id for row in world.left]
        refused = [row.id for row in world.settled if row.exchange == b"e0"]
        assert sorted(ids + refused) == [row.id for row in sent]
        for key in (b"1", b"2"):
            of_key = [row.id for row in world.left if row.aggregate_id == key]
            assert of_key == sorted(of_key)

    asyncio.run(run())


async def test_what_waits_is_settled_as_the_connection_ends() -> None:
    world = World()
    rows = [ROW._replace(id=n, exchange=b"e1") for n in range(3)]
    world.checks.learn(Settled((ROW._replace(exchange=b"e0"),), Outcome.BARRED, MISSING.format("e0")))
    world.checks.send(rows, set())

    world.checks.close()
    assert world.settled == rows[1:]
    world.end(0, lost=True)

    assert world.settled == [*rows[1:], rows[0]]
    assert world.checks.waiting == 0
