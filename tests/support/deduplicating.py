"""A proxy that makes every exchange deduplicating: the broker routes a message_id only once, until `forget`."""

from pamqp import frame
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from tests.support.proxy import FRAME_HEAD, METHOD_FRAME, FaultProxy, Way


class DeduplicatingProxy(FaultProxy):
    """`known`: the message_ids that were published.

    A repeat goes to the queue `repeats`. It is returned if there is no such queue, and nacked if that queue is full.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.known: set[str] = set()
        self.repeats = "repeats"
        self._publish: dict[tuple[int, int], Basic.Publish] = {}  # by connection and channel

    def forget(self) -> None:
        """Route every message_id once more."""
        self.known.clear()

    def instead(self, connection: int, way: Way, data: bytes) -> bytes:
        if way is Way.DOWN or len(data) <= FRAME_HEAD.size or data[:4] == b"AMQP":
            return data
        kind, number, _ = FRAME_HEAD.unpack_from(data)
        method = frame.unmarshal(data)[2]
        if kind == METHOD_FRAME and isinstance(method, Basic.Publish):
            self._publish[connection, number] = method
            return b""
        publish = self._publish.pop((connection, number), None)
        if publish is None or not isinstance(method, ContentHeader):
            return data
        message_id = method.properties.message_id
        if message_id in self.known:
            publish.exchange, publish.routing_key = "", self.repeats
        elif message_id is not None:
            self.known.add(message_id)
        return frame.marshal(publish, number) + data
