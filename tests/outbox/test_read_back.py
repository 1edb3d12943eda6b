"""What a writer wrote is read back by the same connection or session, before it is committed."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from relay.outbox import Event
from relay.testing import AsyncOutbox, Outbox
from tests.outbox.conftest import MessageTable
from tests.outbox.writers import CHECKED, Writer, called, is_async

pytestmark = pytest.mark.every_postgres

INVOICE = Event(
    "Invoice",
    "42",
    "InvoiceIssued",
    {"amount": 12.5, "text": "ä😀 \\ ' %s :x", "id": UUID(int=7)},
    headers={"source": "till", "deep": [1, {"null": None}]},
    exchange="billing",
    routing_key="",
    available_at=datetime(2031, 2, 3, 4, 5, 6, 789012, tzinfo=UTC),
)
SCAN = Event("Scan", None, "Scanned", b"\x00\xff\\", content_type="image/png")


@pytest.fixture(params=list(CHECKED))
def writer(request: pytest.FixtureRequest) -> Writer:
    return CHECKED[request.param]


async def test_an_uncommitted_row_is_read_as_the_event(writer: Writer, module_url: str, table: MessageTable) -> None:
    async with writer(module_url) as transaction:
        outbox = AsyncOutbox if is_async(transaction.target) else Outbox
        await transaction.add(INVOICE, SCAN)

        invoice, scan = (row for row in await called(outbox(transaction.target).all) if row.event_type != "Filler")
        await called(outbox(transaction.target).clear)
        left = await called(outbox(transaction.target).all)
        await transaction.rollback()

    assert (invoice, scan) == (INVOICE, SCAN)
    assert (invoice.message_id, scan.message_id) == (INVOICE.message_id, SCAN.message_id)
    assert (invoice.state, scan.payload(bytes)) == ("pending", b"\x00\xff\\")
    assert left == []
    assert table.rows() == []
