"""A TCP proxy between a client and a server. The test decides its faults, exact to the AMQP frame.

    async with FaultProxy("127.0.0.1", 5672) as proxy:  # the client connects to 127.0.0.1:proxy.port
        proxy.hold(Way.DOWN)                            # confirms do not arrive
        await proxy.wait_seen(Way.DOWN, Basic.Ack, 1)   # the broker has confirmed; the client cannot know
        proxy.cut(Act.RESET)

pamqp's classes name the methods. The proxy counts frames from its start, over all connections; one Basic.Ack may
confirm many messages. With `amqp=False` it carries any TCP protocol, without the functions for frames. It cannot
read TLS.
"""

import asyncio
import fcntl
import socket
import struct
import termios
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from types import TracebackType
from typing import Self, assert_never

from pamqp.base import Frame
from pamqp.commands import INDEX_MAPPING, Basic

Method = type[Frame]

NUMBERS = count()  # no two connections of a process have the same, whatever proxies carry them
READ_AHEAD = 1000  # frames taken in while a way is held or delayed; then TCP pushes back
FRAME_HEAD = struct.Struct(">BHI")  # type, channel, size of what stands before the end octet
METHOD_FRAME, HEADER_FRAME, BODY_FRAME = 1, 2, 3
WITH_CONTENT = {Basic.Publish, Basic.Deliver, Basic.Return, Basic.GetOk}


class Way(StrEnum):
    """The direction of a fault."""

    UP = "up"  # from the client to the server
    DOWN = "down"  # from the server to the client


class Act(StrEnum):
    """What a fault does to a connection."""

    RESET = "reset"  # RST to both sides
    CLOSE = "close"  # FIN to both sides
    HOLD = "hold"  # nothing more passes that way, on any connection, until it is released


@dataclass(slots=True)
class _Piece:
    """What is forwarded in one go: a frame, or the bytes that came in if the protocol is not AMQP."""

    data: bytes
    before: Act | None = None
    after: Act | None = None
    due: float = 0.0


@dataclass(slots=True)
class _Message:
    """A method on one channel whose content has not come yet."""

    method: Method
    nth: int
    missing: int | None = None  # bytes of the body; None before the content header


@dataclass(slots=True, eq=False)
class _Link:
    """A client's connection to the proxy, and the proxy's connection to the server."""

    number: int
    writers: list[asyncio.StreamWriter]
    task: asyncio.Task[None] | None = None
    cut: Act = Act.CLOSE  # how it will end
    is_cut: bool = False  # nothing more passes, also before its task knows that it is cancelled
    channels: dict[tuple[Way, int], _Message] = field(default_factory=dict)


class _LinkEndedError(Exception):
    """The link ends, and so do the tasks that forward for it."""


class FaultProxy:
    """Forwards a port to a server. `at`: the address and port to listen on; port 0 takes a free one."""

    def __init__(self, host: str, port: int, *, amqp: bool = True, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.address, self.port = at
        self.seen: Counter[tuple[Way, Method]] = Counter()  # what came in, forwarded or not
        self.delay = {Way.UP: 0.0, Way.DOWN: 0.0}  # seconds on the way, alike for each frame
        self._due = {Way.UP: 0.0, Way.DOWN: 0.0}  # of the last piece
        self.refusing = False  # new connections are reset at once
        self.refused = 0  # so many of them
        self.fired = asyncio.Event()  # a rule of `on_frame` or `cut_after` has acted
        self._upstream = (host, port)
        self._amqp = amqp
        self._gates = {way: asyncio.Event() for way in Way}
        self._rules: dict[tuple[Way, Method, int, bool], Act] = {}
        self._limits: dict[Way, tuple[int, Act]] = {}
        self._links: set[_Link] = set()
        self._tasks: list[asyncio.Task[None]] = []  # the server calls back outside of any TaskGroup
        self._counted = asyncio.Condition()
        for gate in self._gates.values():
            gate.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.address, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut(Act.RESET)
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    @property
    def connections(self) -> int:
        return len(self._links)

    def hold(self, way: Way) -> None:
        """Let nothing pass in this direction, also on new connections. The data waits in the proxy."""
        self._gates[way].clear()

    def release(self, way: Way) -> None:
        """Forward what was held, and everything after it."""
        self._gates[way].set()

    def cut(self, action: Act = Act.RESET) -> None:
        """End every open connection now and drop what was held on them. New connections are accepted."""
        for link in list(self._links):
            link.cut, link.is_cut = action, True
            if link.task is not None:
                link.task.cancel()

    def cut_after(self, way: Way, size: int, action: Act = Act.RESET) -> None:
        """End a connection once, right after the `size`-th byte from now on."""
        self._limits[way] = (size, action)

    def on_frame(self, way: Way, method: Method, nth: int, action: Act, *, before: bool = True) -> None:
        """Act on the `nth` frame of a method, counted as in `seen`. The frame must not have come yet.

        With `before` the frame does not arrive; else it arrives with all of its content. A cut ends the connection
        of that frame only, after everything in front of it has arrived. A hold is for all connections.
        """
        self._rules[way, method, nth, before] = action

    def disarm(self) -> None:
        """Drop the rules of `on_frame` and `cut_after` that have not acted yet."""
        self._rules.clear()
        self._limits.clear()
        self.fired.clear()

    async def wait_seen(self, way: Way, method: Method, count: int, within: float = 60.0) -> None:
        """Wait until `count` frames of a method have come in, forwarded or not. Raises TimeoutError."""
        async with asyncio.timeout(within), self._counted:
            await self._counted.wait_for(lambda: self.seen[way, method] >= count)

    def comes(self, connection: int, way: Way, data: bytes) -> None:
        """Called before a frame or some bytes pass. A subclass may still `hold` their direction."""

    def instead(self, connection: int, way: Way, data: bytes) -> bytes:  # noqa: ARG002
        """Return what to forward instead of a frame or some bytes, for subclasses; b"" drops them."""
        return data

    def passes(self, connection: int, way: Way, data: bytes) -> None:
        """Called right before a frame or some bytes are forwarded, for subclasses."""

    def ended(self, connection: int) -> None:
        """Called when nothing more passes on a connection, for subclasses."""

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(next(NUMBERS), [writer])
        link.task = asyncio.create_task(self._carry(link, reader), name="proxy.carry")
        self._tasks.append(link.task)

    async def _carry(self, link: _Link, from_client: asyncio.StreamReader) -> None:
        """Forward both ways until one side ends, or a fault ends it; then end the other side."""
        self._links.add(link)
        try:
            if self.refusing:
                self.refused += 1
                link.cut = Act.RESET
                return
            from_server, to_server = await asyncio.open_connection(*self._upstream)
            link.writers.append(to_server)
            async with asyncio.TaskGroup() as pumps:
                for way, reader, writer in (
                    (Way.UP, from_client, to_server),
                    (Way.DOWN, from_server, link.writers[0]),
                ):
                    pieces: asyncio.Queue[_Piece | None] = asyncio.Queue(READ_AHEAD)
                    pumps.create_task(self._receive(link, way, reader, pieces), name=f"proxy.receive.{way}")
                    pumps.create_task(self._forward(link, way, writer, pieces), name=f"proxy.forward.{way}")
        except* (OSError, _LinkEndedError):
            pass  # a side is gone, or a fault was asked for
        finally:
            self._links.discard(link)
            self.ended(link.number)
            await _end(link)

    async def _receive(
        self, link: _Link, way: Way, reader: asyncio.StreamReader, pieces: asyncio.Queue[_Piece | None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        try:
            if self._amqp and way is Way.UP:
                await pieces.put(_Piece(await reader.readexactly(8)))  # the protocol's name and version
            while True:
                piece = await self._next_frame(link, way, reader) if self._amqp else _Piece(await reader.read(65536))
                if not piece.data:
                    break
                # Never before what came earlier, on whatever connection: a delay may end while frames are still due.
                piece.due = self._due[way] = max(self._due[way], clock() + self.delay[way])
                await pieces.put(piece)
        except asyncio.IncompleteReadError as end:
            await pieces.put(_Piece(end.partial))
        await pieces.put(None)

    async def _next_frame(self, link: _Link, way: Way, reader: asyncio.StreamReader) -> _Piece:
        head = await reader.readexactly(FRAME_HEAD.size)
        kind, channel, size = FRAME_HEAD.unpack(head)
        piece = _Piece(head + await reader.readexactly(size + 1))
        message = link.channels.get((way, channel))
        if kind == METHOD_FRAME:
            method = INDEX_MAPPING[int.from_bytes(piece.data[7:11])]
            message = _Message(method, await self._count(way, method), None if method in WITH_CONTENT else 0)
            link.channels[way, channel] = message
            piece.before = self._rules.pop((way, method, message.nth, True), None)
        elif kind == HEADER_FRAME and message is not None:
            message.missing = int.from_bytes(piece.data[11:19])
        elif kind == BODY_FRAME and message is not None and message.missing is not None:
            message.missing -= size
        if message is not None and message.missing == 0:
            piece.after = self._rules.pop((way, message.method, message.nth, False), None)
        return piece

    async def _count(self, way: Way, method: Method) -> int:
        async with self._counted:
            self.seen[way, method] += 1
            self._counted.notify_all()
            return self.seen[way, method]

    async def _forward(
        self, link: _Link, way: Way, writer: asyncio.StreamWriter, pieces: asyncio.Queue[_Piece | None]
    ) -> None:
        # 0: drain() returns when the kernel has taken everything, so that a cut falls where it was asked for.
        writer.transport.set_write_buffer_limits(high=0)
        clock = asyncio.get_running_loop().time
        while (piece := await pieces.get()) is not None:
            if (early := piece.due - clock()) > 0:
                await asyncio.sleep(early)
            await self._act(piece.before, link, way, writer)
            self.comes(link.number, way, piece.data)
            piece.data = self.instead(link.number, way, piece.data)
            await self._gates[way].wait()
            if link.is_cut:
                raise _LinkEndedError
            size, action = self._limits.get(way, (len(piece.data) + 1, None))
            self.passes(link.number, way, piece.data[:size])
            writer.write(piece.data[:size])
            await writer.drain()
            if action is not None and len(piece.data) >= size:
                del self._limits[way]
                await self._act(action, link, way, writer)
            elif action is not None:
                self._limits[way] = (size - len(piece.data), action)
            await self._act(piece.after, link, way, writer)
        raise _LinkEndedError

    async def _act(self, action: Act | None, link: _Link, way: Way, writer: asyncio.StreamWriter) -> None:
        match action:
            case None:
                return
            case Act.HOLD:
                self.hold(way)
                self.fired.set()
            case Act.RESET | Act.CLOSE:
                await _wait_delivered(writer)
                link.cut = action
                self.fired.set()
                raise _LinkEndedError
            case _:
                assert_never(action)


async def _wait_delivered(writer: asyncio.StreamWriter, within: float = 30.0) -> None:
    """Wait until the peer's kernel has everything that was written. A reset before that would drop the rest."""
    connection: socket.socket = writer.get_extra_info("socket")
    async with asyncio.timeout(within):
        # The kernel tells nobody when its send queue runs empty.
        while struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def _end(link: _Link) -> None:
    for writer in link.writers:
        if link.cut is Act.RESET:
            connection: socket.socket = writer.get_extra_info("socket")
            with suppress(OSError):  # closed already by its peer
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if link.cut is Act.RESET or writer.transport.get_write_buffer_size():
            writer.transport.abort()
        writer.close()
    for writer in link.writers:
        with suppress(OSError):  # how the peer ended does not matter any more
            await writer.wait_closed()
