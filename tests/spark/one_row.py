"""One row of `df.write.format("outbox").save()` in this process: what Spark would call, without its Java."""

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from outbox_spark import source

Row = dict[str, Any]
ROW = {
    "invoice_id": "INV-1",
    "customer_id": "C1",
    "issued_on": date(2026, 1, 1),
    "quantity": 1,
    "amount": Decimal("1.11"),
}
ROWS = pa.schema(
    {
        "invoice_id": pa.string(),
        "customer_id": pa.string(),
        "issued_on": pa.date32(),
        "quantity": pa.int32(),
        "amount": pa.decimal128(12, 2),
    }
)


def billing_options(url: str) -> dict[str, str]:
    """Options of a good write into billing.invoice, as a batch without a name."""
    return {
        "url": url,
        "dbtable": "billing.invoice",
        "aggregateType": "customer",
        "aggregateIdColumn": "customer_id",
        "eventType": "InvoiceIssued",
    }


def write_one_row(options: Mapping[str, str], number: int) -> None:
    """Write a row of billing.invoice, as Spark does."""
    task = SimpleNamespace(get=lambda: SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 0))
    rows = pa.RecordBatch.from_pylist([{**ROW, "invoice_id": f"INV-{number}"}], ROWS)
    outbox = source.OutboxDataSource({name.lower(): value for name, value in options.items()})
    with patch.object(source, "TaskContext", task):
        writer = outbox.writer(from_arrow_schema(ROWS), overwrite=False)
        writer.commit([writer.write(iter([rows]))])


def row(number: int, **changed: Any) -> Row:
    """Make an invoice."""
    made: Row = {
        "invoice_id": f"INV-{number}",
        "customer_id": f"C{number % 7}",
        "issued_on": date(2026, 1, 1 + number % 28),
        "quantity": number % 5 + 1,
        "amount": Decimal(number),
        "gone": False,
    }
    return made | changed
