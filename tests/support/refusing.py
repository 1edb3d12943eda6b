"""A proxy that answers a client's messages as a broker does that refuses them, whatever they are.

    async with RefusingProxy("127.0.0.1", 5672) as proxy:
        proxy.refusal = Refusal(406, "PRECONDITION_FAILED - low disk space")  # until it is None again

No RabbitMQ says so at a test's command: others refuse while their disk is full, or when a token has ended. The broker
behind the proxy gets a close of the channel instead of the message. Its answer becomes the refusal, so both sides agree
on what is open.
"""

from collections.abc import Callable
from typing import NamedTuple

from pamqp import frame
from pamqp.commands import Basic, Channel

from tests.support.proxy import FRAME_HEAD, METHOD_FRAME, FaultProxy, Way


class Refusal(NamedTuple):
    """What closes a channel over a message."""

    code: int
    words: str  # may name `{exchange}`
    refuses: Callable[[Basic.Publish], bool] = lambda _: True


class RefusingProxy(FaultProxy):
    """`refusal`: what each message gets; None lets all pass. `closed`: how many channels it has closed."""

    refusal: Refusal | None = None
    closed = 0

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._closing: dict[tuple[int, int], Channel.Close] = {}  # by connection and channel

    def instead(self, connection: int, way: Way, data: bytes) -> bytes:
        kind, number, _ = FRAME_HEAD.unpack_from(data) if len(data) > FRAME_HEAD.size else (0, 0, 0)
        at = (connection, number)
        method = frame.unmarshal(data)[2] if kind == METHOD_FRAME and data[:4] != b"AMQP" else None
        if way is Way.UP and at in self._closing:
            if isinstance(method, Channel.CloseOk):
                del self._closing[at]
            return b""
        if way is Way.UP and isinstance(method, Basic.Publish) and self.refusal and self.refusal.refuses(method):
            self.closed += 1
            words = self.refusal.words.format(exchange=method.exchange or "amq.default")
            self._closing[at] = Channel.Close(self.refusal.code, words, 60, 40)
            return frame.marshal(Channel.Close(200, "", 0, 0), number)
        if way is Way.DOWN and at in self._closing and isinstance(method, Channel.CloseOk):
            return frame.marshal(self._closing[at], number)
        return data
