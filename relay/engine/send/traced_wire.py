"""A span for each batch that goes to the broker, linked to the traces in which its rows were written.

The traced wire stands between the sender and a wire. It exists only when OpenTelemetry is set up
(`observe.tracing.tracer`). The relay sends each row's trace headers unchanged, so a consumer continues the row's trace.
The names are from OpenTelemetry's semantic conventions for messaging and RabbitMQ.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from yarl import URL

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.message import trace_headers
from relay.engine.send.routes import Router
from relay.engine.send.wire import Settle, Wire

OPERATION = "publish"
MAX_LINKS = 128  # the SDK keeps this number for each span by default; rows of one trace share a link
PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(slots=True)
class Batch:
    """A span, and how many of its messages are still in flight."""

    span: Span
    open: int
    failed: bool = False


class TracedWire:
    """See `wire.Wire`. `wire` is the wire that it traces; that wire passes outcomes to this object's `settle`."""

    wire: Wire

    def __init__(self, tracer: Tracer, server: URL, router: Router, settle: Settle) -> None:
        self._tracer = tracer
        self._server: dict[str, AttributeValue] = {"server.address": server.host or "", "server.port": server.port or 0}
        self._router = router
        self._settle = settle
        self._batches: dict[int, Batch] = {}  # by row id: a row is in flight at most once

    @property
    def in_flight(self) -> int:
        return self.wire.in_flight

    def send(self, rows: Iterable[Row], redelivered: set[int]) -> None:
        rows = tuple(rows)
        batch = Batch(self._start(rows), len(rows))
        self._batches.update((row.id, batch) for row in rows)
        self.wire.send(rows, redelivered)

    def settle(self, settled: Settled) -> None:
        self._note(settled)
        self._settle(settled)

    async def run(self) -> None:
        await self.wire.run()

    async def close(self) -> list[Settled]:
        lost = await self.wire.close()
        for settled in lost:
            self._note(settled)
        return lost

    def unconfirmed_for(self, now: float) -> float:
        return self.wire.unconfirmed_for(now)

    def sent_before(self, moment: float) -> list[Row]:
        return self.wire.sent_before(moment)

    def _start(self, rows: Sequence[Row]) -> Span:
        addresses = {self._router.address(row) for row in rows}
        exchanges = {address.exchange.decode() for address in addresses}
        attributes: dict[str, AttributeValue] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": OPERATION,
            "messaging.operation.type": "send",
            "messaging.batch.message_count": len(rows),
            **self._server,
        }
        name = OPERATION
        if len(exchanges) == 1:
            (exchange,) = exchanges
            name = f"{OPERATION} {exchange or 'amq.default'}"
            attributes["messaging.destination.name"] = exchange
        if len(addresses) == 1:
            (address,) = addresses
            routing_key = address.routing_key.decode()
            attributes["messaging.rabbitmq.destination.routing_key"] = routing_key
            attributes["messaging.destination.name"] = ":".join(filter(None, (*exchanges, routing_key)))
        # A separate trace: the span belongs to all of its rows alike.
        return self._tracer.start_span(
            name, context=Context(), kind=SpanKind.CLIENT, attributes=attributes, links=_links(rows)
        )

    def _note(self, settled: Settled) -> None:
        for row in settled.rows:
            batch = self._batches.pop(row.id, None)
            if batch is None:
                continue
            batch.open -= 1
            if settled.outcome is not Outcome.CONFIRMED and not batch.failed:
                batch.failed = True
                batch.span.set_attribute("error.type", settled.outcome)
                batch.span.set_status(Status(StatusCode.ERROR, settled.reason))
            if not batch.open:
                batch.span.end()


def _links(rows: Iterable[Row]) -> list[Link]:
    links: list[Link] = []
    for written_in in dict.fromkeys(map(trace_headers, rows)):
        if len(links) == MAX_LINKS:
            break
        context = get_current_span(PROPAGATOR.extract(dict(written_in))).get_span_context()
        if context.is_valid:
            links.append(Link(context))
    return links
