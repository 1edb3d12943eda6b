"""A kit for the tests of an application: what it wrote, in a database that a test may have alone.

def test_an_invoice_is_issued(connection):
    issue_invoice(connection, number=42)

    Outbox(connection).assert_written("InvoiceIssued", key=("Invoice", "42"), payload={"amount": 12.5})

The rows are those of the real table, read in the caller's own transaction. `Harness` runs the handlers of a consumer.
No relay and no broker is needed.
"""

from typing import TYPE_CHECKING, Any

from relay.errors import importing
from relay.testing.brokers import virtual_host
from relay.testing.capture import capture
from relay.testing.databases import migrate, template_database
from relay.testing.outbox import AsyncOutbox, Outbox
from relay.testing.transaction import require_transaction
from relay.testing.written import Written

if TYPE_CHECKING:
    from relay.testing.contracts import assert_compatible
    from relay.testing.handed import message
    from relay.testing.harness import Dead, DeliveryReport, Harness
    from relay.testing.scenario import Scenario

__all__ = [
    "AsyncOutbox",
    "Dead",
    "DeliveryReport",
    "Harness",
    "Outbox",
    "Scenario",
    "Written",
    "assert_compatible",
    "capture",
    "message",
    "migrate",
    "require_transaction",
    "template_database",
    "virtual_host",
]


def __getattr__(name: str) -> Any:
    # Only the tests of a consumer have what these need.
    if name in {"Dead", "DeliveryReport", "Harness"}:
        with importing("consume"):
            from relay.testing import harness  # noqa: PLC0415

        return getattr(harness, name)
    if name == "message":
        with importing("consume"):
            from relay.testing.handed import message  # noqa: PLC0415

        return message
    if name == "assert_compatible":
        with importing("testing"):
            from relay.testing.contracts import assert_compatible  # noqa: PLC0415

        return assert_compatible
    if name == "Scenario":
        with importing("relay"):
            from relay.testing.scenario import Scenario  # noqa: PLC0415

        return Scenario
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
