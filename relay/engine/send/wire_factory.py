"""Make the kind of wire that the settings ask for."""

from aiormq.abc import AbstractChannel as Underlay

from relay.config.settings import WireKind
from relay.engine.send.codec import Encoder
from relay.engine.send.frames import FrameWire
from relay.engine.send.message import Identity
from relay.engine.send.plain_wire import PlainWire
from relay.engine.send.routes import Router
from relay.engine.send.wire import Settle, Wire
from relay.observe import tracing
from relay.observe.histogram import Histogram
from relay.servers.rabbitmq.connection import Connection


class Wires:
    """Makes wires for a channel and a `Settle`; all record how long confirms take in `times`."""

    def __init__(self, kind: WireKind, router: Router, identity: Identity, times: Histogram) -> None:
        self._kind = kind
        self._router = router
        self._identity = identity
        self._times = times

    def on(self, channel: Underlay, connection: Connection, settle: Settle) -> Wire:
        """Return a wire on this channel; with a tracer, it traces its batches."""
        if (tracer := tracing.tracer()) is None:
            return self._bare(channel, connection, settle)
        from relay.engine.send.traced_wire import TracedWire  # noqa: PLC0415  (imports OpenTelemetry)

        traced = TracedWire(tracer, connection.url, self._router, settle)
        traced.wire = self._bare(channel, connection, traced.settle)
        return traced

    def _bare(self, channel: Underlay, connection: Connection, settle: Settle) -> Wire:
        if self._kind is WireKind.PUBLISH:
            return PlainWire(channel, self._router, self._identity, settle, clock=connection.clock, times=self._times)
        frame_max = channel.connection.connection_tune.frame_max
        encoder = Encoder(channel.number, frame_max, self._router, self._identity)
        return FrameWire(channel, encoder, settle, clock=connection.clock, times=self._times)
