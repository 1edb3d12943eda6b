"""A kit for the tests of an application: what it wrote, in a database that a test may have alone.

def test_an_invoice_is_issued(connection):
    issue_invoice(connection, number=42)

    Outbox(connection).assert_written("InvoiceIssued", key=("Invoice", "42"), payload={"amount": 12.5})

The rows are those of the real table, read in the caller's own transaction. No relay and no broker is needed.
"""

from relay.testing.capture import capture
from relay.testing.databases import migrate, template_database
from relay.testing.outbox import AsyncOutbox, Outbox
from relay.testing.transaction import require_transaction
from relay.testing.written import Written

__all__ = [
    "AsyncOutbox",
    "Outbox",
    "Written",
    "capture",
    "migrate",
    "require_transaction",
    "template_database",
]
