"""A reader of frames that does not fail on any content that an AMQP client has put into a message.

The AMQP library ends the connection at a frame that it cannot decode. Then the broker would deliver the message again,
without end.
"""

import asyncio
import struct

from aiormq.connection import FrameReceiver, ReceivedFrame
from aiormq.exceptions import AMQPConnectionError, InvalidFrameError
from pamqp import frame
from pamqp.commands import Basic, Channel, Connection
from pamqp.constants import FRAME_END, FRAME_HEADER, FRAME_METHOD

from relay.servers.rabbitmq.content_header import RAW_HEADER, RAW_METHOD, decode_header, mark, shown

START = struct.Struct(">BHI")  # type, channel, size
DELIVER = struct.pack(">HH", 60, 60)  # class and method
TAG_AND_MARK = struct.Struct(">QB")
CLOSES: dict[bytes, type[Connection.Close | Channel.Close]] = {
    struct.pack(">HH", 10, 50): Connection.Close,
    struct.pack(">HH", 20, 40): Channel.Close,
}
CODE_AND_LENGTH = struct.Struct(">HB")
CLASS_AND_METHOD = struct.Struct(">HH")


class FrameReader(FrameReceiver):
    """Reads one frame after the other; if a message cannot be decoded, its headers say so (`content_header`)."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._undecodable: dict[int, bytes] = {}  # by channel: a `basic.deliver` whose header frame comes next

    async def get_frame(self) -> ReceivedFrame:
        if self.reader.at_eof():
            raise StopAsyncIteration
        try:
            start = await self.reader.readexactly(START.size)
            kind, channel, size = START.unpack(start)
            rest = await self.reader.readexactly(size + 1)
        except asyncio.IncompleteReadError as error:
            raise AMQPConnectionError("Server connection unexpectedly closed") from error
        except OSError as error:
            raise AMQPConnectionError(f"Server communication error: {error!r}") from error
        if rest[-1] != FRAME_END:
            raise InvalidFrameError("a frame without its end")
        if kind == FRAME_HEADER:
            header = decode_header(rest[:-1])
            if method := self._undecodable.pop(channel, None):
                fault = "its exchange or routing key is not UTF-8"
                mark(header, fault, {RAW_METHOD: method, RAW_HEADER: rest[:-1]})
            return size, channel, header
        try:
            return frame.unmarshal(start + rest)
        except Exception as error:
            method = rest[: len(DELIVER)] if kind == FRAME_METHOD else b""
            if method == DELIVER:
                self._undecodable[channel] = rest[:-1]
                return size, channel, _legible(rest[:-1])
            if method in CLOSES:
                return size, channel, _legible_close(rest[:-1])
            raise InvalidFrameError(str(error)) from error


def _legible(method: bytes) -> Basic.Deliver:
    """Return a `basic.deliver` with its texts escaped."""
    tag_at = len(DELIVER)
    at = tag_at + 1 + method[tag_at]
    delivery_tag, mark = TAG_AND_MARK.unpack_from(method, at)
    at += TAG_AND_MARK.size
    key_at = at + 1 + method[at]
    delivered = Basic.Deliver(shown(method[tag_at + 1 : at - TAG_AND_MARK.size]), delivery_tag, bool(mark & 1))
    # Set without a check: the library's constructor refuses names of exchanges that the broker takes.
    delivered.exchange, delivered.routing_key = shown(method[at + 1 : key_at]), shown(method[key_at + 1 :])
    return delivered


def _legible_close(method: bytes) -> Connection.Close | Channel.Close:
    """Return a close without the last character of its reply text, of which the broker has sent only a part."""
    kind, at = CLOSES[method[: len(DELIVER)]], len(DELIVER)
    code, length = CODE_AND_LENGTH.unpack_from(method, at)
    at += CODE_AND_LENGTH.size
    text = method[at : at + length].decode(errors="ignore")
    return kind(code, text, *CLASS_AND_METHOD.unpack_from(method, at + length))
