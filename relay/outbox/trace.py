"""The trace in which a row is written: the row carries it to the consumer."""

import sys

import orjson

TRACE_FIELDS = ("traceparent", "tracestate")


def current_trace_context() -> str | None:
    """Return the current W3C trace context as JSON text; None if no span is active.

    Baggage is left out: it would reach every reader of the queue.
    """
    # Only code that has imported OpenTelemetry can have started a span. Without it, the import (20 ms) is not made.
    if "opentelemetry.context" not in sys.modules:
        return None
    from opentelemetry import propagate  # noqa: PLC0415

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    kept = {field: carrier[field] for field in TRACE_FIELDS if field in carrier}
    return orjson.dumps(kept).decode() if kept else None
