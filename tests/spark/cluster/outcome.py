"""Ways to write 100 invoices, and what each must leave in the database: all of them once, or nothing."""

from dataclasses import dataclass, field

import psycopg
import pytest

from tests.spark.frames import counts, one, staging_tables

# Rows that have no event, and events that have no row, with the same key and amount.
UNEVEN = """
    SELECT count(*)
    FROM billing.invoice AS invoice FULL JOIN outbox.message AS event
        ON event.payload->>'invoice_id' = invoice.invoice_id AND event.aggregate_id = invoice.customer_id
        AND (event.payload->>'amount')::numeric = invoice.amount
    WHERE event.id IS NULL OR invoice.invoice_id IS NULL
"""
MESSAGE_IDS = "SELECT count(DISTINCT message_id) FROM outbox.message"
COMMITTED = """
    SELECT (row_counts->>'rows')::int, (row_counts->>'messages')::int FROM outbox.batch WHERE partition = -1
"""
OPEN = """
    SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-spark/log' AND datname = current_database()
"""


@dataclass(frozen=True)
class WriteWay:
    """A way to write a batch atomically."""

    name: str
    partitions: int
    ledger_rows: int
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


NAME = {"txnAppId": "nightly", "txnVersion": "7", "batchsize": "10"}  # so that a partition comes in several ingests
BATCH = WriteWay("batch", 4, 1, NAME)
PARTITION = WriteWay("partition", 4, 4 + 2, {**NAME, "atomic": "partition", "numPartitions": "4"})
SINGLE_TASK = WriteWay("single-task", 1, 1 + 2, {**NAME, "singleTask": "true"})
WAYS = pytest.mark.parametrize("way", [BATCH, PARTITION, SINGLE_TASK], ids=str)


def assert_written_once(connection: psycopg.Connection, way: WriteWay) -> None:
    assert counts(connection) == (100, 100, way.ledger_rows)
    assert one(connection, MESSAGE_IDS) == 100
    assert one(connection, UNEVEN) == 0
    assert connection.execute(COMMITTED).fetchall() == [(100, 100)]
    assert staging_tables(connection) == []


def assert_nothing_written(connection: psycopg.Connection) -> None:
    assert counts(connection)[:2] == (0, 0)
    assert connection.execute(COMMITTED).fetchall() == []


def is_left_alone(url: str) -> bool:
    """Whether no driver and no executor has a session in this database."""
    with psycopg.connect(url) as connection:
        return bool(one(connection, OPEN) == 0)
