"""The proxy does exactly what the test has told it, and forwards the rest unchanged."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.frame import marshal
from pamqp.header import ContentHeader, ProtocolHeader

from tests.support.proxy import Act, FaultProxy, Way

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

GREETING = ProtocolHeader().marshal()
ACK = [marshal(Basic.Ack(delivery_tag=tag), 1) for tag in range(4)]


def publish(body: bytes) -> bytes:
    """Return the frames of a message, with its body in two of them."""
    middle = len(body) // 2
    return b"".join(
        (
            marshal(Basic.Publish(exchange="outbox", routing_key="a.b"), 1),
            marshal(ContentHeader(body_size=len(body)), 1),
            marshal(ContentBody(body[:middle]), 1),
            marshal(ContentBody(body[middle:]), 1),
        )
    )


class Peer:
    """A server that gives the test its ends of the connections."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Streams] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.accepted.put((reader, writer))


@asynccontextmanager
async def proxied(kind: type[FaultProxy] = FaultProxy, *, amqp: bool = True) -> AsyncIterator[tuple[FaultProxy, Peer]]:
    peer = Peer()
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    async with kind("127.0.0.1", server.sockets[0].getsockname()[1], amqp=amqp) as proxy:
        yield proxy, peer
    server.close()
    await server.wait_closed()


@asynccontextmanager
async def connected(
    proxy: FaultProxy, peer: Peer, greeting: bytes = GREETING
) -> AsyncIterator[tuple[Streams, Streams]]:
    """Yield both ends of a connection through the proxy, after the greeting."""
    client = await asyncio.open_connection("127.0.0.1", proxy.port)
    client[1].write(greeting)
    async with asyncio.timeout(5):
        server = await peer.accepted.get()
        assert await server[0].readexactly(len(greeting)) == greeting
    try:
        yield client, server
    finally:
        for _, writer in (client, server):
            writer.transport.abort()
            writer.close()


async def read_to_end(reader: asyncio.StreamReader) -> tuple[bytes, type[OSError] | None]:
    """Return what came until the peer ended, with the error if it was a reset."""
    data = b""
    async with asyncio.timeout(5):
        try:
            while chunk := await reader.read(65536):
                data += chunk
        except ConnectionResetError as error:
            return data, type(error)
    return data, None


async def test_it_carries_bytes_both_ways_and_counts_frames() -> None:
    message = publish(b"x" * 1000)
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        client[1].write(message * 3)
        server[1].write(ACK[1] + ACK[2])

        assert await server[0].readexactly(len(message) * 3) == message * 3
        assert await client[0].readexactly(len(ACK[1]) * 2) == ACK[1] + ACK[2]

        assert proxy.seen == {(Way.UP, Basic.Publish): 3, (Way.DOWN, Basic.Ack): 2}


async def test_what_is_held_waits_and_arrives_when_released() -> None:
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        proxy.hold(Way.DOWN)
        server[1].write(ACK[1])
        await proxy.wait_seen(Way.DOWN, Basic.Ack, 1)
        client[1].write(ACK[2])  # the other way is open
        assert await server[0].readexactly(len(ACK[2])) == ACK[2]
        reading = asyncio.create_task(client[0].readexactly(len(ACK[1])))
        assert not reading.done()

        proxy.release(Way.DOWN)

        assert await reading == ACK[1]


async def test_a_reset_before_the_nth_frame_lets_those_in_front_arrive_and_that_one_not() -> None:
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        proxy.on_frame(Way.DOWN, Basic.Ack, 3, Act.RESET)
        received: asyncio.Queue[bytes] = asyncio.Queue()

        server[1].write(ACK[1] + ACK[2])
        await received.put(await client[0].readexactly(len(ACK[1]) * 2))
        server[1].write(ACK[3])

        assert await received.get() == ACK[1] + ACK[2]
        assert await read_to_end(client[0]) == (b"", ConnectionResetError)
        assert await read_to_end(server[0]) == (b"", ConnectionResetError)
        assert proxy.fired.is_set()


async def test_a_close_after_the_nth_message_lets_its_whole_content_arrive() -> None:
    first, second = publish(b"a" * 500), publish(b"b" * 500)
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        proxy.on_frame(Way.UP, Basic.Publish, 1, Act.CLOSE, before=False)

        client[1].write(first + second)

        assert await read_to_end(server[0]) == (first, None)


async def test_a_hold_at_the_nth_frame_stops_there() -> None:
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        proxy.on_frame(Way.UP, Basic.Ack, 2, Act.HOLD)

        client[1].write(ACK[1] + ACK[2])
        await asyncio.wait_for(proxy.fired.wait(), 5)
        client[1].transport.abort()

        assert await server[0].readexactly(len(ACK[1])) == ACK[1]
        proxy.cut(Act.CLOSE)
        assert await read_to_end(server[0]) == (b"", None)


@pytest.mark.parametrize("size", [1, 7, 20, 21, 22])
async def test_it_cuts_behind_a_given_byte(size: int) -> None:
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        proxy.cut_after(Way.UP, size, Act.CLOSE)

        client[1].write(ACK[1] + ACK[2])

        assert await read_to_end(server[0]) == ((ACK[1] + ACK[2])[:size], None)
        assert proxy.fired.is_set()


async def test_a_delay_keeps_order_and_is_not_paid_again_by_each_frame() -> None:
    frames = ACK[1] * 200
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        proxy.delay[Way.UP] = 0.2
        clock = asyncio.get_running_loop().time
        started = clock()

        client[1].write(frames)

        async with asyncio.timeout(20):  # one after the other they would take 40 s
            assert await server[0].readexactly(len(frames)) == frames
        assert clock() - started >= 0.2


async def test_a_cut_ends_what_is_open_and_the_next_connection_works() -> None:
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        proxy.cut(Act.RESET)

        assert await read_to_end(client[0]) == (b"", ConnectionResetError)
        assert await read_to_end(server[0]) == (b"", ConnectionResetError)
        async with connected(proxy, peer) as (again, other):
            again[1].write(ACK[1])
            assert await other[0].readexactly(len(ACK[1])) == ACK[1]
            assert proxy.connections == 1


async def test_from_a_cut_on_nothing_passes_not_even_what_is_let_go_in_the_same_moment() -> None:
    class Cutting(FaultProxy):
        def comes(self, connection: int, way: Way, data: bytes) -> None:  # noqa: ARG002 - the proxy calls it so
            if data == b"answer":
                self.cut()
                self.release(way)

    async with proxied(Cutting, amqp=False) as (proxy, peer), connected(proxy, peer, b"hello") as (client, server):
        proxy.hold(Way.DOWN)

        server[1].write(b"answer")

        assert await read_to_end(client[0]) == (b"", ConnectionResetError)


async def test_while_it_refuses_new_connections_are_reset() -> None:
    async with proxied() as (proxy, peer):
        proxy.refusing = True

        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)

        assert await read_to_end(reader) == (b"", ConnectionResetError)
        assert peer.accepted.empty()
        writer.close()


async def test_the_end_of_one_side_is_passed_on_behind_its_last_byte() -> None:
    async with proxied() as (proxy, peer), connected(proxy, peer) as (client, server):
        client[1].write(ACK[1] + ACK[2][:5])
        client[1].close()

        assert await read_to_end(server[0]) == (ACK[1] + ACK[2][:5], None)


async def test_any_other_protocol_passes_unread() -> None:
    async with proxied(amqp=False) as (proxy, peer), connected(proxy, peer, b"hello") as (client, server):
        proxy.cut_after(Way.DOWN, 3, Act.CLOSE)

        server[1].write(b"world")

        assert await read_to_end(client[0]) == (b"wor", None)
        assert not proxy.seen
