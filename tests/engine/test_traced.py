"""Each batch that is published is a span with links to its rows' traces; without OpenTelemetry there is no span."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from yarl import URL

from relay.engine.row import Outcome, Settled
from relay.engine.send.routes import Router
from relay.engine.send.traced_wire import MAX_LINKS, TracedWire
from relay.observe import tracing
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.recording_wire import RecordingWire
from tests.engine.rows import rows
from tests.support.eventually import eventually

TRACEPARENT = "00-{trace:032x}-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What a relay of this process exports from now on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # As if this process had set it up; set_tracer_provider works once a process only.
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


class Losing(RecordingWire):
    """Loses what is in flight at its end."""

    async def close(self) -> list[Settled]:
        return [Settled(tuple(self.open), Outcome.UNKNOWN, "the connection was lost")]


def written_in(number: int) -> str:
    return json.dumps({"traceparent": TRACEPARENT.format(trace=number)})


def links(span: ReadableSpan) -> list[int]:
    return [link.context.trace_id for link in span.links]


async def test_a_batch_is_a_span_linked_to_the_traces_of_its_rows(
    outbox: Outbox, queue: Reader, run_node: RunNode, spans: InMemorySpanExporter
) -> None:
    for key, number in (("1", 1), ("2", 2), ("3", 2), ("4", None)):
        await outbox.insert(key, trace_context=None if number is None else written_in(number))

    async with run_node():
        await eventually(outbox.is_empty, "sent")
        messages = await queue.drain(4)

    (span,) = spans.get_finished_spans()
    assert (span.name, span.kind, span.parent) == ("publish outbox", SpanKind.CLIENT, None)
    assert span.status.status_code is StatusCode.UNSET
    assert sorted(links(span)) == [1, 2]
    attributes = dict(span.attributes or {})
    assert attributes.pop("server.address") == "127.0.0.1"
    assert isinstance(attributes.pop("server.port"), int)
    assert attributes == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.batch.message_count": 4,
        "messaging.destination.name": "outbox:customer.InvoiceIssued",
        "messaging.rabbitmq.destination.routing_key": "customer.InvoiceIssued",
    }
    carried = sorted(str(message.headers.get("traceparent")) for message in messages)
    assert carried == [*(TRACEPARENT.format(trace=number) for number in (1, 2, 2)), "None"]


async def test_what_the_broker_does_not_take_is_an_error_of_its_batch(
    outbox: Outbox, queue: Reader, run_node: RunNode, spans: InMemorySpanExporter
) -> None:
    await outbox.insert(exchange="", routing_key="nobody")

    async with run_node():
        await eventually(lambda: bool(spans.get_finished_spans()), "a span")

    span = spans.get_finished_spans()[0]
    assert (span.attributes or {})["error.type"] == "returned"
    assert span.status.status_code is StatusCode.ERROR
    assert "NO_ROUTE" in (span.status.description or "")


async def test_a_span_lasts_until_the_last_of_its_messages_is_settled(spans: InMemorySpanExporter) -> None:
    tracer, wire, settled = tracing.tracer(), Losing(), list[Settled]()
    assert tracer is not None
    traced = TracedWire(tracer, URL("amqp://broker:5672/"), Router((), "outbox"), settled.append)
    traced.wire = wire

    traced.send(rows([1, 2, 3]), set())
    traced.settle(Settled(wire.open[:2], Outcome.CONFIRMED))
    before = spans.get_finished_spans()
    wire.open = wire.open[2:]
    await traced.close()

    assert before == ()
    (span,) = spans.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "unknown"
    assert [len(each.rows) for each in settled] == [2]  # what is lost is for who closes the wire


async def test_links_are_bounded_and_a_strange_context_is_none(
    outbox: Outbox, queue: Reader, run_node: RunNode, spans: InMemorySpanExporter
) -> None:
    strange = [json.dumps(text) for text in ({"traceparent": 5}, {"traceparent": "x"}, {})]
    for key, context in enumerate([*strange, *map(written_in, range(1, MAX_LINKS + 20))]):
        await outbox.insert(str(key), trace_context=context, headers=None)

    async with run_node():
        await eventually(outbox.is_empty, "sent")

    batches = spans.get_finished_spans()
    assert sum((span.attributes or {})["messaging.batch.message_count"] for span in batches) == MAX_LINKS + 22  # type: ignore[misc]
    assert max(len(span.links) for span in batches) == MAX_LINKS


def test_without_a_provider_there_is_no_tracer_and_nothing_is_imported() -> None:
    look = (
        "import sys, relay.cli.run, relay.engine.node, relay.probes.node\n"
        "from relay.observe import tracing\n"
        "tracing.set_up({})()\n"
        "assert tracing.tracer() is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )

    seen = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)

    assert seen.stdout == "[]\n"


def test_the_api_alone_sets_nothing_up() -> None:
    assert tracing.tracer() is None
