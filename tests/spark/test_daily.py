"""Days of real purchases, billed once, in any order, and by the difference when they change."""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pyspark.sql import SparkSession

import daily
import purchases
import sales_tests
from outbox_spark import message_id
from outbox_spark.jobs.command import JobError
from outbox_spark.ledger import enter
from sales import TIERS, of_days
from tests.spark.frames import one, staging_tables
from tests.spark.running import refused, run_job
from tests.support.purchases import purchases as cdnow

pytestmark = pytest.mark.jobs

DAYS = [date(1997, 1, 1), date(1997, 1, 2)]
BAD = [" 00001 19970102  0   11.77", " 00001 19970102  1   many", " 00001 1997xx02  1   2.00", "nonsense"]
EVENTS = "SELECT event_type, aggregate_id, message_id::text, payload::text FROM outbox.message ORDER BY id"
TIER_OF_LATE = ("CustomerReachedTier", "99999")

Bill = Callable[..., list[dict[str, Any]]]
Purchase = tuple[str, date, int, Decimal]


@pytest.fixture(scope="session")
def slice_of_cdnow() -> list[str]:
    """Lines of two days: customers who bought on both, every tenth of the others, and four bad ones."""
    lines = [line.rstrip() for line in cdnow().read_text().splitlines()[1:]]
    of_days = [line for line in lines if line.split()[1] in {f"{day:%Y%m%d}" for day in DAYS}]
    days_of = defaultdict(set)
    for line in of_days:
        days_of[line.split()[0]].add(line.split()[1])
    kept = [line for line in of_days if len(days_of[line.split()[0]]) > 1 or line.split()[0].endswith("7")]
    return [*kept[:50], *BAD, *kept[50:]]


@pytest.fixture
def input_file(tmp_path: Path, slice_of_cdnow: list[str]) -> Path:
    file = tmp_path / "purchases.txt"
    file.write_text("\n".join(slice_of_cdnow))
    return file


@pytest.fixture
def bill(spark: SparkSession, database_url: str, connection: psycopg.Connection, input_file: Path) -> Bill:
    """Bill days of the file as it is now."""
    connection.execute(daily.TABLES.encode())

    def bill_days(*days: date, withdraw: bool = False) -> list[dict[str, Any]]:
        options = argparse.Namespace(url=database_url, withdraw=withdraw, partitions=2, outbox_schema="outbox")
        parsed = purchases.parse(purchases.read_lines(spark, str(input_file)))
        wanted = of_days(parsed, min(days), max(days)).localCheckpoint()
        return [daily.bill_day(spark, wanted, day, options) for day in days]

    return bill_days


def test_days_are_billed_as_an_independent_count_says(
    bill: Bill, connection: psycopg.Connection, input_file: Path
) -> None:
    told = bill(DAYS[1], DAYS[0])  # in any order

    bought = _read(input_file)
    assert _written(connection) == bought
    assert _totals(connection) == _expected_totals(bought)
    assert sum(Decimal(day["amount"]) for day in told) == sum(amount for *_, amount in bought)
    # Lines of no day are looked at with each, and written once.
    assert [(day["quarantined"], day["new_quarantined"]) for day in told] == [(4, 4), (2, 0)]
    quarantine = connection.execute("SELECT issued_on, line FROM sales.quarantine ORDER BY line_number").fetchall()
    assert quarantine == [(DAYS[1], BAD[0]), (DAYS[1], BAD[1]), (None, BAD[2]), (None, BAD[3])]
    assert staging_tables(connection) == []

    events = _events(connection)
    issued = [payload for kind, _, _, payload in events if kind == "InvoiceIssued"]
    lines = [
        (payload["customer_id"], date.fromisoformat(payload["issued_on"]), line["quantity"], line["amount"])
        for payload in issued
        for line in payload["lines"]
    ]
    assert sorted(lines) == bought
    assert all(sum(line["amount"] for line in payload["lines"]) == payload["amount"] for payload in issued)
    reached = [(key, payload["tier"]) for kind, key, _, payload in events if kind == "CustomerReachedTier"]
    assert sorted(reached) == _expected_tiers(bought)
    place = next(place for place, event in enumerate(events) if event[0] == "CustomerReachedTier")
    kind, key, id_, payload = events[place]
    made = message_id("", 0, aggregate_type="customer", aggregate_id=key, event_type=kind, sequence=payload["tier"])
    assert id_ == str(made)
    # Behind the invoice that made the customer reach it, in the order of the relay.
    before = [each for each in events[:place] if each[1] == key][-1]
    assert (before[0], before[3]["issued_on"]) == ("InvoiceIssued", payload["reached_on"])

    input_file.write_text(f"\n\n{input_file.read_text()}".replace(" 00001 ", "  00001\t"))
    (again,) = bill(DAYS[0])  # other places and blanks, the same purchases; bad lines are named where they stand

    assert (again["changed_lines"], again["changed_invoices"], again["new_quarantined"]) == (0, 0, 2)
    assert bill(DAYS[0])[0]["recognised"]
    assert _events(connection) == events


def test_a_day_that_changes_is_written_by_the_difference(
    bill: Bill, connection: psycopg.Connection, input_file: Path
) -> None:
    lines = [line for line in input_file.read_text().splitlines() if DAYS[0].strftime("%Y%m%d") in line]
    input_file.write_text("\n".join(lines))
    bill(DAYS[0])
    before, totals = _events(connection), _totals(connection)
    corrected, gone, *same = lines
    customer, day, quantity, amount = corrected.split()
    late = " 99999 19970101  3   1234.56"
    input_file.write_text("\n".join([f" {customer} {day} {quantity} 0.01", *same, late]))
    with pytest.raises(JobError, match=r"1997-01-01: nothing .*: test withdrawals: 1 lines .* --withdraw"):
        bill(DAYS[0])
    assert (_events(connection), _totals(connection)) == (before, totals)

    (told,) = bill(DAYS[0], withdraw=True)

    assert (told["changed_lines"], told["changed_invoices"], told["withdrawn"]) == (3, 3, 1)
    bought = _read(input_file)
    assert _written(connection) == bought
    no_more = gone.split()[0]
    assert _totals(connection) == {
        **_expected_totals(bought),
        no_more: (Decimal(0), totals[no_more][1]),  # what was reached stays
        customer: (Decimal("0.01"), totals[customer][1]),
    }
    events = {(kind, key): payload for kind, key, _, payload in _events(connection)[len(before) :]}
    assert set(events) == {
        ("InvoiceCorrected", customer),
        ("InvoiceCorrected", no_more),
        ("InvoiceIssued", "99999"),
        ("CustomerReachedTier", "99999"),
    }
    first = events["InvoiceCorrected", customer]
    assert (first["revision"], first["previous_amount"], first["amount"]) == (2, Decimal(amount), Decimal("0.01"))
    assert (events["InvoiceCorrected", no_more]["amount"], events["InvoiceCorrected", no_more]["lines"]) == (0, [])
    tiers = [payload["tier"] for kind, key, _, payload in _events(connection) if (kind, key) == TIER_OF_LATE]
    assert tiers == [tier for tier, _ in TIERS]
    assert bill(DAYS[0], withdraw=True)[0]["recognised"]


def test_of_two_runs_at_once_one_writes_and_the_other_looks_again(
    bill: Bill, connection: psycopg.Connection, input_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examine = sales_tests.examine
    twins: list[dict[str, Any]] = []

    def meet_a_twin(*arguments: Any, **words: Any) -> Any:
        found = examine(*arguments, **words)
        with monkeypatch.context() as alone:  # which has read, and not written yet
            alone.setattr(daily, "examine", examine)
            twins.extend([] if twins else bill(DAYS[0]))
        return found

    monkeypatch.setattr(daily, "examine", meet_a_twin)
    (told,) = bill(DAYS[0])

    bought = [each for each in _read(input_file) if each[1] == DAYS[0]]
    assert ([twin["recognised"] for twin in twins], told["recognised"]) == ([False], True)
    assert _written(connection) == bought
    assert _totals(connection) == _expected_totals(bought)
    assert one(connection, "SELECT count(*) FROM outbox.message") == len(_events(connection))


def test_a_ledger_that_knows_more_than_the_tables_is_told(bill: Bill, connection: psycopg.Connection) -> None:
    enter(connection, "outbox", app_id="sales", version=1, partitions=1, token=uuid4(), row_counts={"rows": 0})

    with pytest.raises(JobError, match=r"the ledger has batch 'sales' version 1, but sales\.run has no such run"):
        bill(DAYS[0])

    assert _written(connection) == []


@pytest.mark.timeout(300)
def test_the_job_tells_its_days_and_fails_with_the_data_test(
    database_url: str, connection: psycopg.Connection, input_file: Path
) -> None:
    arguments = ["--input", str(input_file), "--url", database_url]
    # Another input than the one that was billed: of the day it has nothing.
    connection.execute(daily.TABLES.encode())
    connection.execute("INSERT INTO sales.invoice_line VALUES ('1-19970103', 1, '1', '1997-01-03', 2, 12.50)")

    done = run_job("daily.py", *arguments, "--from", "1997-01-02", "--to", "1997-01-03")

    assert (done.returncode, done.stdout) == (1, "")
    told, failed = [line for line in done.stderr.splitlines() if line.startswith("daily.py: ")]
    assert told.startswith("daily.py: 1 of 2: 1997-01-02: ")
    assert failed == (
        "daily.py: 1997-01-03: nothing of the day was written: test withdrawals: 1 lines are billed that the input "
        "does not have any more, without --withdraw, for example invoice_id 1-19970103, position 1"
    )
    assert one(connection, "SELECT array_agg(day::text) FROM sales.run") == ["1997-01-02"]


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    good = ["--input", str(tmp_path), "--url", "postgresql://postgres@127.0.0.1:1/nowhere"]

    refused("daily.py", 2, "there is no none.txt", *good, "--input", "none.txt", "--day", "1997-01-01")
    refused("daily.py", 2, "give the days with --day, or with --from and --to", *good)
    refused("daily.py", 2, "give the days with --day, or with --from and --to", *good, "--from", "1997-01-01")
    refused("daily.py", 2, "is after --to 1997-01-01", *good, "--from", "1997-01-02", "--to", "1997-01-01")
    refused("daily.py", 1, "Connection refused", *good, "--day", "1997-01-01")


def _events(connection: psycopg.Connection) -> list[tuple[str, str, str, dict[str, Any]]]:
    rows = connection.execute(EVENTS).fetchall()
    return [(kind, key, id_, json.loads(payload, parse_float=Decimal)) for kind, key, id_, payload in rows]


def _read(file: Path) -> list[Purchase]:
    """Read the purchases without Spark."""
    found = []
    for line in file.read_text().splitlines():
        if line.strip() and line not in BAD:
            customer, day, quantity, amount = line.split()
            found.append((customer, date.fromisoformat(day), int(quantity), Decimal(amount)))
    return sorted(found)


def _written(connection: psycopg.Connection) -> list[Purchase]:
    """Return the lines that are not empty, each of an invoice whose sums are theirs."""
    wrong = """
        SELECT count(*) FROM sales.invoice FULL JOIN (
            SELECT invoice_id, sum(quantity) AS quantity, sum(amount) AS amount FROM sales.invoice_line GROUP BY 1
        ) AS line USING (invoice_id)
        WHERE (invoice.quantity, invoice.amount) IS DISTINCT FROM (line.quantity, line.amount)
    """
    assert one(connection, wrong) == 0
    lines = "SELECT customer_id, issued_on, quantity, amount FROM sales.invoice_line WHERE quantity > 0"
    return sorted(connection.execute(lines.encode()).fetchall())


def _totals(connection: psycopg.Connection) -> dict[str, tuple[Decimal, int]]:
    found = connection.execute("SELECT customer_id, total, tiers_reached FROM sales.customer").fetchall()
    return {customer: (total, tiers) for customer, total, tiers in found}


def _expected_totals(bought: Sequence[Purchase]) -> dict[str, tuple[Decimal, int]]:
    totals: dict[str, Decimal] = defaultdict(Decimal)
    for customer, _, _, amount in bought:
        totals[customer] += amount
    return {customer: (total, sum(total >= threshold for _, threshold in TIERS)) for customer, total in totals.items()}


def _expected_tiers(bought: Sequence[Purchase]) -> list[tuple[str, str]]:
    totals = _expected_totals(bought)
    return sorted((customer, name) for customer, (_, tiers) in totals.items() for name, _ in TIERS[:tiers])
