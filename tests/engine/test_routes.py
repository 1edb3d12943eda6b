"""A row finds its exchange and routing key."""

import pytest

from relay.config.settings import Route
from relay.engine.row import Address, Row
from relay.engine.send.routes import Router
from tests.engine.rows import ROW

ROUTES = (
    Route(event_type="Invoice*", aggregate_type="customer", exchange="invoices", routing_key="{event_type}"),
    Route(event_type="*Failed", exchange="failures"),
)


@pytest.mark.parametrize(
    ("row", "address"),
    [
        (ROW, (b"invoices", b"InvoiceIssued")),
        (ROW._replace(event_type=b"InvoiceFailed"), (b"invoices", b"InvoiceFailed")),
        (ROW._replace(aggregate_type=b"order", event_type=b"PaymentFailed"), (b"failures", b"order.PaymentFailed")),
        (ROW._replace(aggregate_type=b"order"), (b"outbox", b"order.InvoiceIssued")),
        (ROW._replace(exchange=b"mine"), (b"mine", b"InvoiceIssued")),
        (ROW._replace(routing_key=b"mine"), (b"invoices", b"mine")),
        (ROW._replace(exchange=b"", routing_key=b"queue"), (b"", b"queue")),
        (ROW._replace(event_type=b"Invoice{aggregate_type}"), (b"invoices", b"Invoice{aggregate_type}")),
    ],
)
def test_the_row_s_own_address_wins_then_the_first_route_then_the_default(
    row: Row, address: tuple[bytes, bytes]
) -> None:
    assert Router(ROUTES, "outbox").address(row) == Address(*address)
