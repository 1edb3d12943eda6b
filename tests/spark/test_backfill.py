"""The programs of docs/backfill.md: days that are corrected, and a batch that is taken back."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import date
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession

from outbox_spark.reading.table import read_table
from tests.prose.pages import programs

pytestmark = pytest.mark.jobs

PAGE = "docs/backfill.md"
DAY = date(2026, 11, 20)
MAKE = """
    CREATE SCHEMA shop;
    CREATE TABLE shop.invoice (invoice_id text PRIMARY KEY, customer_id text, issued_on date, amount numeric(12, 2))
"""
WRITTEN = "SELECT invoice_id, amount FROM shop.invoice"
EVENTS = "SELECT event_type, message_id::text, payload::text FROM outbox.message ORDER BY id"
SEND = "UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE payload ->> 'invoice_id' = '1'"
RIGHT = {"1": "10.00", "2": "20.00", "3": "30.00"}
WRONG = {**RIGHT, "1": "11.00", "2": "22.00", "4": "44.00"}

Correct = Callable[[Mapping[str, str]], int | None]
Event = tuple[str, str, Decimal, Decimal]  # type, invoice, amount, previous amount


@pytest.fixture
def page(connection: psycopg.Connection) -> dict[str, Any]:
    """What the programs of the page define, next to their table."""
    connection.execute(MAKE)
    defined: dict[str, Any] = {}
    for program in programs(PAGE):
        exec(program, defined)
    return defined


@pytest.fixture
def correct(spark: SparkSession, database_url: str, page: dict[str, Any]) -> Correct:
    """Correct the day to these amounts; return the version."""

    def run(amounts: Mapping[str, str]) -> int | None:
        version: int | None = page["correct_day"](spark, database_url, invoices(spark, amounts), DAY)
        return version

    return run


def test_each_correction_takes_the_next_version_and_writes_the_difference(
    correct: Correct, connection: psycopg.Connection
) -> None:
    versions = [correct(RIGHT), correct(WRONG), correct({"4": "44.00"})]
    before = len(events(connection))

    again = correct({"4": "44.00"})

    assert (versions, again) == ([2026112000, 2026112001, 2026112002], None)
    assert written(connection) == amounts({"1": "0", "2": "0", "3": "0", "4": "44"})
    assert sorted(events(connection)[3:]) == sorted(
        [
            corrected("1", "11", "10"),
            corrected("2", "22", "20"),
            ("InvoiceIssued", "4", Decimal(44), Decimal(0)),
            *(corrected(each, "0", WRONG[each]) for each in ("1", "2", "3")),
        ]
    )
    assert len(events(connection)) == before


def test_of_two_corrections_at_once_the_later_one_looks_again(
    spark: SparkSession, correct: Correct, connection: psycopg.Connection, page: dict[str, Any]
) -> None:
    def meet_a_twin(*given: Any, **named: Any) -> DataFrame:
        found = read_table(*given, **named)
        if page["read_table"] is meet_a_twin:  # the version is taken, and the table is read
            page["read_table"] = read_table
            found = found.localCheckpoint()
            correct(WRONG)
        return found

    page["read_table"] = meet_a_twin

    assert correct(RIGHT) == 2026112001
    assert written(connection) == amounts({**RIGHT, "4": "0"})


def test_a_batch_is_taken_back_in_reverse_order_once_where_it_still_stands(
    spark: SparkSession, database_url: str, correct: Correct, connection: psycopg.Connection, page: dict[str, Any]
) -> None:
    correct(RIGHT)
    assert correct(WRONG) == 2026112001
    connection.execute(SEND)  # some are sent, and some are pending
    correct({**WRONG, "2": "22.50"})  # no event of the wrong batch is the last word on it
    before = len(events(connection))
    wrong = [id_ for _, id_, payload in read(connection) if payload["amount"] in {11, 44}]

    done = page["take_back"](spark, database_url, 2026112001)
    again = page["take_back"](spark, database_url, 2026112001)

    assert (done, again) == (True, False)
    assert written(connection) == amounts({**RIGHT, "2": "22.50", "4": "0"})
    assert set(events(connection)[before:]) == {corrected("1", "10", "11"), corrected("4", "0", "44")}
    assert [payload["reverses"] for *_, payload in read(connection)[before:]] == wrong[::-1]
    assert consumed(connection) == written(connection)


def test_events_of_a_key_are_reversed_from_the_last_to_the_first(
    spark: SparkSession, database_url: str, correct: Correct, connection: psycopg.Connection, page: dict[str, Any]
) -> None:
    many = {str(number): f"{number}.00" for number in range(1, 31)}
    version = correct(many)
    connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE id % 2 = 0")

    page["take_back"](spark, database_url, version)

    order = [invoice for _, invoice, *_ in events(connection)]
    of_customers = [[each for each in order if customer_of(each) == customer] for customer in ("a", "b")]
    assert [each[len(each) // 2 :] for each in of_customers] == [
        each[len(each) // 2 - 1 :: -1] for each in of_customers
    ]
    assert consumed(connection) == dict.fromkeys(many, Decimal(0))


def test_what_a_batch_wrote_is_found_by_its_name(correct: Correct, connection: psycopg.Connection) -> None:
    correct(RIGHT)
    correct(WRONG)
    (found,) = programs(PAGE, "sql")
    ledger, rows = (connection.execute(each.encode()).fetchall() for each in found.split(";\n")[:2])

    assert [row_counts["messages"] for _, row_counts in ledger] == [3]
    assert sorted(row[:3] for row in rows) == [("pending", "InvoiceCorrected", 2), ("pending", "InvoiceIssued", 1)]


def invoices(spark: SparkSession, of: Mapping[str, str]) -> DataFrame:
    rows = [(each, customer_of(each), Decimal(amount)) for each, amount in of.items()]
    return spark.createDataFrame(rows, "invoice_id string, customer_id string, amount decimal(12, 2)")


def customer_of(invoice: str) -> str:
    """Return the customer of an invoice; one has most of them."""
    return "b" if invoice.endswith("3") else "a"


def corrected(invoice: str, amount: str, before: str) -> Event:
    return "InvoiceCorrected", invoice, Decimal(amount), Decimal(before)


def amounts(given: Mapping[str, str]) -> dict[str, Decimal]:
    return {invoice: Decimal(amount) for invoice, amount in given.items()}


def written(connection: psycopg.Connection) -> dict[str, Decimal]:
    return dict(connection.execute(WRITTEN).fetchall())


def read(connection: psycopg.Connection) -> list[tuple[str, str, dict[str, Any]]]:
    rows = connection.execute(EVENTS).fetchall()
    return [(kind, id_, json.loads(payload, parse_float=Decimal)) for kind, id_, payload in rows]


def events(connection: psycopg.Connection) -> list[Event]:
    return [(kind, each["invoice_id"], each["amount"], each["previous_amount"]) for kind, _, each in read(connection)]


def consumed(connection: psycopg.Connection) -> dict[str, Decimal]:
    """Return what two consumers make of the events, one that replaces and one that adds up: both have the same."""
    kept: dict[str, Decimal] = {}
    added: dict[str, Decimal] = defaultdict(Decimal)
    for _, invoice, amount, before in events(connection):
        kept[invoice] = amount
        added[invoice] += amount - before
    assert kept == added
    return kept
