"""The relay's wire and the oracle tell what became of each message, matched by its delivery tag."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from aiormq.abc import AbstractChannel as Underlay
from pamqp.commands import Basic
from pamqp.common import FieldTable

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send import codec, frames
from relay.engine.send.frames import FrameWire
from relay.engine.send.message import MessageIdentity
from relay.engine.send.routes import Router
from relay.engine.send.wire import Settle, Wire
from tests.engine.conftest import Reader
from tests.engine.plain_wire import PlainWire
from tests.engine.rows import ROW
from tests.support.eventually import eventually
from tests.support.proxy import Act, FaultProxy, Way

IDENTITY = MessageIdentity(b"outbox-relay", 4096)
ROUTER = Router((), "outbox")


def frame_wire(channel: Underlay, settle: Settle, encoder: type[frames.Encoder] = codec.Encoder) -> Wire:
    tune = channel.connection.connection_tune
    return FrameWire(channel, encoder(channel.number, tune.frame_max, ROUTER, IDENTITY), settle)


def pure_frame_wire(channel: Underlay, settle: Settle) -> Wire:
    return frame_wire(channel, settle, frames.Encoder)


def plain_wire(channel: Underlay, settle: Settle) -> Wire:
    return PlainWire(channel, ROUTER, IDENTITY, settle)


class Sender:
    """A wire with what it settled."""

    def __init__(self, wire: Callable[[Underlay, Settle], Wire], channel: Underlay) -> None:
        self.settled: list[tuple[int, Outcome]] = []
        self.reasons: dict[int, str] = {}
        self.wire = wire(channel, self.note)
        self.running = asyncio.create_task(self.wire.run())

    def note(self, settled: Settled) -> None:
        for row in settled.rows:
            self.settled.append((row.id, settled.outcome))
            self.reasons[row.id] = settled.reason

    async def send(self, *rows: Row, redelivered: frozenset[int] = frozenset()) -> None:
        self.wire.send(rows, set(redelivered))

    async def outcomes(self, number: int) -> dict[int, Outcome]:
        await eventually(lambda: len(self.settled) >= number, f"{number} outcomes")
        assert len(self.settled) == number
        return dict(self.settled)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        for lost in await self.wire.close():
            self.note(lost)


Open = Callable[[str], Awaitable[Sender]]


@pytest.fixture(params=[frame_wire, pure_frame_wire, plain_wire])
async def open_wire(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    connections = []

    async def open_(url: str) -> Sender:
        connection = await aio_pika.connect(url)
        connections.append(connection)
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        return Sender(request.param, await channel.get_underlay_channel())

    yield open_
    for connection in connections:
        await connection.close()


@pytest.fixture
async def sender(open_wire: Open, broker_url: str) -> AsyncIterator[Sender]:
    sender = await open_wire(broker_url)
    yield sender
    await sender.close()


def rows(number: int) -> list[Row]:
    return [ROW._replace(id=n, message_id=b"%036d" % n) for n in range(1, number + 1)]


async def test_messages_arrive_in_sending_order_and_are_confirmed(sender: Sender, queue: Reader) -> None:
    await sender.send(*rows(500))

    assert set((await sender.outcomes(500)).values()) == {Outcome.CONFIRMED}
    assert await queue.ids(500) == list(range(1, 501))
    assert sender.wire.in_flight == 0


async def test_a_repeat_says_that_it_is_one(sender: Sender, queue: Reader) -> None:
    await sender.send(*rows(2), redelivered=frozenset({2}))

    first, second = await queue.drain(2)
    assert "x-outbox-redelivered" not in first.headers
    assert second.headers["x-outbox-redelivered"] is True


async def test_bodies_of_every_size_arrive(sender: Sender, queue: Reader) -> None:
    bodies = [b"", b"x", b"y" * 4096]
    await sender.send(*(ROW._replace(id=n, payload=None, payload_bytes=body) for n, body in enumerate(bodies)))

    assert [message.body for message in await queue.drain(3)] == bodies


async def test_an_unroutable_message_is_returned_and_its_neighbours_are_not(sender: Sender, queue: Reader) -> None:
    lost = ROW._replace(id=2, exchange=b"", routing_key=b"nowhere")

    await sender.send(ROW._replace(id=1), lost, ROW._replace(id=3))

    assert await sender.outcomes(3) == {1: Outcome.CONFIRMED, 2: Outcome.RETURNED, 3: Outcome.CONFIRMED}
    assert "312 NO_ROUTE" in sender.reasons[2]


async def test_a_full_queue_that_rejects_nacks(sender: Sender, channel: AbstractChannel) -> None:
    limits: FieldTable = {"x-max-length": 1, "x-overflow": "reject-publish", "x-queue-type": "quorum"}
    await channel.declare_queue("full", durable=True, arguments=limits)
    # A quorum queue rejects a moment after it is full.
    for n in range(1, 20):
        await sender.send(ROW._replace(id=n, exchange=b"", routing_key=b"full"))
        outcome = (await sender.outcomes(n))[n]
        if outcome is Outcome.NACKED:
            return
        assert outcome is Outcome.CONFIRMED
    pytest.fail("nothing was nacked")


@pytest.mark.parametrize("broken", [{"payload": b"x" * 5000}, {"headers": b'{"big": 18446744073709551615}'}])
async def test_what_cannot_be_encoded_is_refused_alone(sender: Sender, queue: Reader, broken: dict[str, bytes]) -> None:
    await sender.send(ROW._replace(id=1), ROW._replace(id=2, **broken), ROW._replace(id=3))  # type: ignore[arg-type]

    assert await sender.outcomes(3) == {1: Outcome.CONFIRMED, 2: Outcome.UNSENDABLE, 3: Outcome.CONFIRMED}
    assert await queue.ids(2) == [1, 3]


async def test_a_missing_exchange_closes_the_channel_and_is_named_as_the_reason(sender: Sender, queue: Reader) -> None:
    await sender.send(ROW._replace(id=1, exchange=b"missing"), ROW._replace(id=2))
    await asyncio.wait([sender.running], timeout=10)
    await sender.close()

    outcomes = await sender.outcomes(2)
    assert outcomes[1] is Outcome.BARRED
    # The neighbour may have been confirmed just before.
    assert outcomes[2] in {Outcome.UNKNOWN, Outcome.CONFIRMED}
    assert "no exchange 'missing'" in sender.reasons[1]


async def test_two_messages_with_one_message_id_settle_each_by_itself(sender: Sender, queue: Reader) -> None:
    lost = ROW._replace(id=2, exchange=b"", routing_key=b"nowhere")

    await sender.send(ROW._replace(id=1), lost)

    assert (await sender.outcomes(2))[1] is Outcome.CONFIRMED


async def test_without_a_confirm_the_outcome_is_unknown(open_wire: Open, broker_url: str, queue: Reader) -> None:
    address = urlsplit(broker_url)
    async with FaultProxy(str(address.hostname), int(address.port or 0)) as proxy:
        sender = await open_wire(broker_url.replace(f":{address.port}/", f":{proxy.port}/"))
        proxy.hold(Way.DOWN)
        await sender.send(*rows(3))
        assert await queue.ids(3) == [1, 2, 3]
        await proxy.wait_seen(Way.DOWN, Basic.Ack, 1)
        assert sender.wire.in_flight == 3
        assert sender.wire.unconfirmed_for(asyncio.get_running_loop().time()) > 0

        proxy.cut(Act.RESET)
        await asyncio.wait([sender.running], timeout=10)
        await sender.close()

        assert set((await sender.outcomes(3)).values()) == {Outcome.UNKNOWN}


async def test_small_writes_wait_for_a_broker_that_reads_nothing(broker_url: str) -> None:
    """The library's writer would hold as many of them as are sent."""
    address = urlsplit(broker_url)
    async with (
        FaultProxy(str(address.hostname), int(address.port or 0)) as proxy,
        await aio_pika.connect(broker_url.replace(f":{address.port}/", f":{proxy.port}/")) as connection,
    ):
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        sender = Sender(frame_wire, await channel.get_underlay_channel())
        assert isinstance(sender.wire, FrameWire)
        proxy.hold(Way.UP)

        for _ in range(1000):
            await sender.send(*(ROW._replace(id=n, payload_bytes=b"x" * 4000, payload=None) for n in range(8)))
            for _ in range(10):  # let the wire and the library's writer have their turns
                await asyncio.sleep(0)

        unsent = len(sender.wire._unsent)
        proxy.cut(Act.RESET)
        await asyncio.wait([sender.running], timeout=10)
        await sender.close()

    assert unsent > 2000  # of 8000: more than 8 MiB of the 32
