"""A publisher that writes its own frames: a broker may accept what an AMQP library would refuse to send."""

import asyncio
import struct
from contextlib import suppress

from pamqp import frame
from pamqp.base import Frame
from pamqp.commands import Basic, Channel, Confirm, Connection
from pamqp.constants import FRAME_BODY, FRAME_END_CHAR, FRAME_HEADER, FRAME_METHOD
from pamqp.header import ProtocolHeader
from yarl import URL

FRAME_SIZE = 131_072 - 8  # bytes of a frame's payload, with RabbitMQ's default frame_max
SHORT_TEXTS = {
    "content_type": 15,
    "content_encoding": 14,
    "correlation_id": 10,
    "reply_to": 9,
    "expiration": 8,
    "message_id": 7,
    "message_type": 5,
    "user_id": 4,
    "app_id": 3,
    "cluster_id": 2,
}
OCTETS = {"delivery_mode": 12, "priority": 11}
HEADERS, TIMESTAMP = 13, 6  # their bits among the flags


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def long(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def entry(name: bytes, value: bytes) -> bytes:
    """Return the bytes of a table's entry. The value begins with the letter of its type."""
    return short(name) + value


def properties(*, headers: bytes | None = None, timestamp: int | None = None, **given: bytes | int) -> bytes:
    """Return the bytes of properties. Texts are bytes; `headers` are entries, one after the other."""
    parts = {SHORT_TEXTS[name]: short(value) for name, value in given.items() if isinstance(value, bytes)}
    parts |= {OCTETS[name]: bytes([value]) for name, value in given.items() if isinstance(value, int)}
    if headers is not None:
        parts[HEADERS] = long(headers)
    if timestamp is not None:
        parts[TIMESTAMP] = struct.pack(">Q", timestamp)
    flags = sum(1 << bit for bit in parts)
    return struct.pack(">H", flags) + b"".join(parts[bit] for bit in sorted(parts, reverse=True))


class RawClient:
    """Publishes with confirms, one message after the other, whatever bytes they hold."""

    def __init__(self, url: str) -> None:
        self._url = URL(url)
        self._writer: asyncio.StreamWriter | None = None

    async def publish(
        self, properties: bytes, body: bytes = b"1", *, routing_key: bytes = b"billing", exchange: bytes = b""
    ) -> bool:
        """Whether the broker has confirmed the message. If it ends the connection, the next call opens another."""
        if self._writer is None:
            await self._open()
        method = struct.pack(">HHH", 60, 40, 0) + short(exchange) + short(routing_key) + b"\0"
        self._write(FRAME_METHOD, method)
        self._write(FRAME_HEADER, struct.pack(">HHQ", 60, 0, len(body)) + properties)
        for start in range(0, len(body), FRAME_SIZE):
            self._write(FRAME_BODY, body[start : start + FRAME_SIZE])
        with suppress(OSError, asyncio.IncompleteReadError):  # it may end the connection without a word
            if await self._read() == Basic.Ack.index:
                return True
        await self.close()
        return False

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None

    async def _open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._url.host, self._url.port)
        self._writer.write(ProtocolHeader().marshal())
        await self._read()
        credentials = f"\0{self._url.user}\0{self._url.password}"
        self._send(Connection.StartOk({}, "PLAIN", credentials, "en_US"), 0)
        await self._read()
        self._send(Connection.TuneOk(2047, 131_072, 0), 0)
        self._send(Connection.Open(self._url.path.removeprefix("/") or "/"), 0)
        await self._read()
        self._send(Channel.Open(), 1)
        await self._read()
        self._send(Confirm.Select(), 1)
        await self._read()

    def _send(self, method: Frame, channel: int) -> None:
        assert self._writer is not None
        self._writer.write(frame.marshal(method, channel))

    def _write(self, kind: int, payload: bytes) -> None:
        assert self._writer is not None
        self._writer.write(struct.pack(">BHI", kind, 1, len(payload)) + payload + FRAME_END_CHAR)

    async def _read(self) -> int:
        """Return the class and method of a frame as a number. The words of a refusal need not be UTF-8."""
        start = await self._reader.readexactly(7)
        rest = await self._reader.readexactly(int.from_bytes(start[3:]) + 1)
        return int.from_bytes(rest[:4])


def nested(kind: bytes, depth: int) -> bytes:
    """Return the bytes of arrays, or tables, nested to this depth."""
    name = b"" if kind == b"A" else b"\x01a"
    value = b"V"
    for _ in range(depth):
        value = kind + long(name + value)
    return value
