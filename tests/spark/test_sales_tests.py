"""Each data test of a day's bills, with a fault planted that it is there for."""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import purchases
from sales import CUSTOMERS, INVOICES, LINES, QUARANTINE, Bills, Known, bill
from sales_tests import DataTestError, examine

pytestmark = pytest.mark.jobs

DAY = date(1997, 1, 1)
INPUT = "7 19970101 1 60.00\n7 19970101 2 50.00\n8 19970101 1 5.00\n8 19970101 none 5.00\n9 19970102 1 9.99\n"


@pytest.fixture(scope="module")
def bills(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Bills:
    """The good bills of a day: a new customer, and one who was known and has bought something before."""
    file = tmp_path_factory.mktemp("input") / "purchases.txt"
    file.write_text(INPUT)
    known = Known(
        lines=spark.createDataFrame([], LINES),
        invoices=spark.createDataFrame([], INVOICES),
        customers=spark.createDataFrame([("8", Decimal("20.00"), 0)], CUSTOMERS),
        quarantine=spark.createDataFrame([], QUARANTINE),
    )
    return bill(purchases.parse(purchases.read_lines(spark, str(file))), known, DAY)


def test_good_bills_pass(bills: Bills) -> None:
    figures = examine(bills, DAY, may_withdraw=False)

    assert (figures.purchases, figures.lines, figures.quarantined, figures.invoices) == (4, 3, 1, 2)
    assert (figures.changed_lines, figures.changed_invoices, figures.amount) == (3, 2, Decimal("115.00"))


def _without(frame: DataFrame, condition: str) -> DataFrame:
    return frame.where(f"NOT ({condition})")


def _dearer(invoices: DataFrame) -> DataFrame:
    amount = f.when(f.col("customer_id") == "8", 6).otherwise(f.col("amount"))
    return invoices.withColumn("amount", amount.cast("decimal(22, 2)"))


FAULTS: dict[str, tuple[Callable[[Bills], Bills], str]] = {
    "counts": (
        lambda bills: replace(bills, lines=_without(bills.lines, "amount = 5.00")),
        "test counts: 4 lines of the input are 2 lines of invoices and 1 in quarantine, for example file ",
    ),
    "sums of lines": (
        lambda bills: replace(bills, invoices=_dearer(bills.invoices)),
        "invoices 116.00, for example invoice_id 8-19970101, amount_of_lines 5.00, amount 6.00",
    ),
    "sums of totals": (
        lambda bills: replace(bills, customers=_without(bills.customers, "customer_id = '8'")),
        "test sums: invoices change by 115.00, totals by 110.00, for example customer_id 8, invoiced 5.00",
    ),
    "uniqueness of invoices": (
        lambda bills: replace(bills, invoices=bills.invoices.unionByName(bills.invoices.where("customer_id = '8'"))),
        "test uniqueness: 3 invoices have 2 keys, for example invoice_id 8-19970101, times 2",
    ),
    "uniqueness of lines": (
        lambda bills: replace(bills, lines=bills.lines.withColumn("position", f.lit(1))),
        "test uniqueness: 3 lines have 2 keys, for example invoice_id 7-19970101, position 1, times 2",
    ),
    "nulls": (
        lambda bills: replace(bills, lines=bills.lines.withColumn("quantity", f.expr("nullif(quantity, 2)"))),
        "test nulls: 1 of 3 lines have a null, for example invoice_id 7-19970101, position 2",
    ),
    "withdrawals": (
        lambda bills: replace(bills, lines=bills.lines.withColumn("is_withdrawn", f.expr("customer_id = '8'"))),
        "test withdrawals: 1 lines are billed that the input does not have any more, without --withdraw, for example",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_told_with_its_numbers_and_an_example(bills: Bills, fault: str) -> None:
    plant, words = FAULTS[fault]

    with pytest.raises(DataTestError) as failed:
        examine(plant(bills), DAY, may_withdraw=False)

    assert str(failed.value).startswith("1997-01-01: nothing of the day was written: ")
    assert words in str(failed.value)
