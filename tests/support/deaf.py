"""A proxy that stands for a host of RabbitMQ 4.3 without the other nodes: it takes messages and confirms nothing."""

from pamqp import frame
from pamqp.commands import Basic

from tests.support.proxy import FaultProxy, Way


class DeafProxy(FaultProxy):
    """`is_deaf`: whether confirms are dropped."""

    is_deaf = True

    def instead(self, connection: int, way: Way, data: bytes) -> bytes:  # noqa: ARG002  (as the base has it)
        is_confirm = self.is_deaf and way is Way.DOWN and isinstance(frame.unmarshal(data)[2], Basic.Ack)
        return b"" if is_confirm else data
