"""Traces through OpenTelemetry, if the environment asks for them; otherwise OpenTelemetry is not imported.

The engine asks for a `tracer`, and gets one if the process has set up OpenTelemetry's API. `relay run` sets it up from
OpenTelemetry's own variables, with the SDK that the extra `otel` installs.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import relay
from relay.logger import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

log = get_logger(__name__)

SERVICE = "outbox-relay"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FLUSH_TIMEOUT = 2.0  # seconds at the end: an unreachable collector must not hold up the stop


def tracer() -> "Tracer | None":
    """Return a tracer if OpenTelemetry is set up in this process, else `None`."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    found: Tracer = provider.get_tracer(SERVICE, relay.__version__)
    return found


def set_up(environment: Mapping[str, str]) -> Callable[[], None]:
    """Set up OpenTelemetry's SDK if its variables ask for traces, and return the function that ends it.

    If the SDK is missing, that is logged and is no error: a platform may set the variables for every container.
    """
    names = _exporters(environment)
    if not names:
        return lambda: None
    try:
        exporters = [_exporter(name) for name in names]
    except (ImportError, LookupError) as error:
        log.warning("tracing.unavailable", exporters=names, reason=str(error), remedy='install "outbox-relay[otel]"')
        return lambda: None
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    # The SDK itself reads the sampler, the limits and the resource from OTEL_ variables, which override our name.
    is_named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if is_named else {"service.name": SERVICE, "service.version": relay.__version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    log.info("tracing.on", exporters=names)

    def end() -> None:
        flushing = threading.Thread(target=provider.shutdown, name="flush traces", daemon=True)
        flushing.start()
        flushing.join(FLUSH_TIMEOUT)

    return end


def _exporters(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the exporters that the variables ask for, as their packages register them."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    asked = environment.get("OTEL_TRACES_EXPORTER", "otlp" if any(environment.get(name) for name in ENDPOINTS) else "")
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "http/protobuf")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in asked.split(",") if name.strip()]
    return [otlp if name == "otlp" else name for name in names if name != "none"]


def _exporter(name: str) -> "SpanExporter":
    from importlib.metadata import entry_points  # noqa: PLC0415

    for entry in entry_points(group="opentelemetry_traces_exporter", name=name):
        exporter: SpanExporter = entry.load()()
        return exporter
    raise LookupError(f"no installed package has the exporter {name}")
