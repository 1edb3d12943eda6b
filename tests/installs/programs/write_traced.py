"""Write an event in a span, whose context goes along."""

import sys

import psycopg
from opentelemetry.sdk.trace import TracerProvider

from relay.outbox import Event, add

with (
    psycopg.connect(sys.argv[1]) as connection,
    TracerProvider().get_tracer("test").start_as_current_span("issue") as span,
):
    add(connection, Event("customer", "17", "InvoiceIssued", {"invoice": 42}))
    row = connection.execute("SELECT trace_context ->> 'traceparent' FROM outbox.message").fetchone()
    assert row is not None
    assert f"{span.get_span_context().trace_id:032x}" in row[0]
