"""Which lines are purchases, and what is said of the others."""

from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import purchases

HEADER = b" customer_id  date number_of_cds  dollar_value\r\n"


@pytest.fixture
def small_splits(spark: SparkSession) -> Iterator[None]:
    """Make Spark cut even small files into many splits."""
    spark.conf.set("spark.sql.files.maxPartitionBytes", "64")
    spark.conf.set("spark.sql.files.openCostInBytes", "0")
    yield
    spark.conf.unset("spark.sql.files.maxPartitionBytes")
    spark.conf.unset("spark.sql.files.openCostInBytes")


def test_every_line_is_a_purchase_or_has_its_reason(spark: SparkSession, tmp_path: Path) -> None:
    lines = {
        b" 00001 19970101  1   11.77\r": None,
        b"7\t19971231\t99\t0": None,
        b"7 19970101 1 9999999999.99": None,
        b"7 19970101 1": "has not four fields",
        b"7 19970101 1 2 3": "has not four fields",
        b"A7 19970101 1 2.00": "customer id is no number",
        b"7 19970230 1 2.00": "date is no day written YYYYMMDD",
        b"7 1997-01-01 1 2.00": "date is no day written YYYYMMDD",
        b"7 99990101 1 2.00": "date is in the future",
        b"7 19970101 x 2.00": "number of CDs is no whole number",
        b"7 19970101 9999999999 2.00": "number of CDs is no whole number",
        b"7 19970101 0 2.00": "number of CDs is zero",
        b"7 19970101 1 -2.00": "amount is negative",
        b"7 19970101 1 NaN": "amount is no decimal number",
        b"7 19970101 1 1e3": "amount is no decimal number",
        b"7 19970101 1 2.005": "amount has more than two decimals",
        b"7 19970101 1 10000000000": "amount is too large",
        b"7 19970101 1 2.00\xff": "is not UTF-8",
        b"7 19970101 1 2.00\0": "holds a NUL character",
        b" customer_id  date number_of_cds  dollar_value": "customer id is no number",  # not in the first line
    }
    file = tmp_path / "purchases.txt"
    file.write_bytes(HEADER + b"\n".join(lines) + b"\n\n   \n")

    parsed = purchases.parse(purchases.read_lines(spark, str(file)))

    assert purchases.count(parsed) == purchases.Counts(lines=23, headers=1, blank=2, purchases=3, quarantined=17)
    found = {row.line_number: row.reason for row in purchases.quarantined(parsed).collect()}
    assert found == {number: reason for number, reason in enumerate(lines.values(), start=2) if reason}


def test_lines_are_numbered_in_their_file_however_spark_cuts_it(
    spark: SparkSession, tmp_path: Path, small_splits: None
) -> None:
    for name, count in (("a", 57), ("b", 3)):
        (tmp_path / name).write_text("".join(f"line {number}\r\n" for number in range(1, count + 1)))

    lines = purchases.read_lines(spark, str(tmp_path))

    assert lines.rdd.getNumPartitions() > 5
    found = lines.collect()
    assert all(row.raw == f"line {row.line_number}" for row in found)
    assert len(found) == 60


def test_invoices_of_a_customer_follow_day_and_line(spark: SparkSession, tmp_path: Path, small_splits: None) -> None:
    file = tmp_path / "purchases.txt"
    file.write_text("1 19970102 1 3.00\n1 19970101 2 1.00\n2 19970101 1 5.10\n1 19970101 3 2.00\n1 19970102 1 4.00\n")

    made = purchases.invoices(purchases.parse(purchases.read_lines(spark, str(file))), 2).collect()

    assert [(row.invoice_id, row.amount) for row in made if row.customer_id == "1"] == [
        ("1-19970101-1", Decimal("1.00")),
        ("1-19970101-2", Decimal("2.00")),
        ("1-19970102-1", Decimal("3.00")),
        ("1-19970102-2", Decimal("4.00")),
    ]
    (other,) = (row for row in made if row.customer_id == "2")
    assert tuple(other) == ("2-19970101-1", "2", date(1997, 1, 1), 1, Decimal("5.10"))
