"""`relay run` exports spans where OpenTelemetry's own variables say so."""

import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from relay.testing.servers.process import free_port
from tests.http.conftest import StartRelay
from tests.operate.rows import Rows
from tests.support.eventually import eventually


@dataclass
class Collector:
    """Takes spans by OTLP over HTTP, as a collector does."""

    endpoint: str = ""
    names: list[str] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.services.add(named["service.name"])
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    taking = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taking.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        taking.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield taking
        server.shutdown()
        thread.join()


async def test_spans_go_to_the_collector_also_those_of_the_last_moment(
    rows: Rows, start_relay: StartRelay, collector: Collector
) -> None:
    relay = start_relay(OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    await relay.wait_for_log("relay.ready")
    rows.pending(exchange="", routing_key="nobody")
    await eventually(lambda: "returned" in relay.log.read_text() or "quarantine" in relay.log.read_text(), "sent")

    relay.process.stop(signal.SIGTERM)

    assert relay.process.returncode == 0
    assert set(collector.names) == {"publish amq.default"}
    assert collector.services == {"outbox-relay"}
    assert "tracing.on" in relay.log.read_text()


async def test_a_collector_that_says_nothing_holds_nothing_up(rows: Rows, start_relay: StartRelay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        await is_not_held_up(mute.getsockname()[1], rows, start_relay)


async def test_a_collector_that_is_away_holds_nothing_up(rows: Rows, start_relay: StartRelay) -> None:
    await is_not_held_up(free_port(), rows, start_relay)


async def is_not_held_up(port: int, rows: Rows, start_relay: StartRelay) -> None:
    endpoint = f"http://127.0.0.1:{port}"
    relay = start_relay(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_TIMEOUT="60", OTEL_SERVICE_NAME="mine")
    await relay.wait_for_log("relay.ready")
    rows.pending(exchange="", routing_key="nobody")
    await eventually(lambda: "returned" in relay.log.read_text() or "quarantine" in relay.log.read_text(), "sent")

    relay.process.stop(signal.SIGTERM, seconds=20)

    assert relay.process.returncode == 0
    assert "Traceback" not in relay.log.read_text()


async def test_what_is_asked_for_in_vain_is_told_and_no_error(start_relay: StartRelay) -> None:
    relay = start_relay(OTEL_TRACES_EXPORTER="zipkin")

    await relay.wait_for_log("relay.ready")

    (told,) = [event for event in relay.events() if event["event"] == "tracing.unavailable"]
    assert told["reason"] == "no installed package has the exporter zipkin"
