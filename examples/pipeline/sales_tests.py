"""Data tests of a day's bills: whatever fails here, nothing of the day is written."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import reduce

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as f

from sales import Bills

# What makes a row the only one of its kind, and what may be null.
KEYS = {"lines": ("invoice_id", "position"), "invoices": ("invoice_id",), "customers": ("customer_id",)}
NULLABLE = {"file", "line_number", "previous_amount", "known_total"}
NOTHING = Decimal(0)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the bills of a day come to."""

    purchases: int
    quarantined: int
    new_quarantined: int
    lines: int
    changed_lines: int
    invoices: int
    changed_invoices: int
    withdrawn: int
    amount: Decimal  # by which the totals change

    @property
    def has_news(self) -> bool:
        return bool(self.changed_lines or self.new_quarantined)


class DataTestError(Exception):
    """The bills of a day do not hold together; nothing of the day was written."""


def examine(bills: Bills, day: date, *, may_withdraw: bool) -> Figures:
    """Return what the bills come to.

    Raises:
        DataTestError: with each test that failed, its numbers and an example.
    """
    found = _measure(bills)
    purchases, lines, invoices, customers = (found[name] for name in ("purchases", *KEYS))
    failures = [
        *_counts(bills, purchases, lines),
        *_sums(bills, lines, invoices, customers),
        *(each for name in KEYS for each in _repeated(getattr(bills, name), name, found[name])),
        *(each for name in KEYS for each in _nulls(getattr(bills, name), name, found[name])),
        *([] if may_withdraw else _withdrawn(bills, lines)),
    ]
    if failures:
        raise DataTestError(f"{day}: nothing of the day was written: {'; '.join(failures)}")
    return Figures(
        purchases=purchases.rows,
        quarantined=purchases.of_quarantine,
        new_quarantined=found["quarantined"].rows,
        lines=lines.of_input,
        changed_lines=lines.changed,
        invoices=invoices.rows,
        changed_invoices=invoices.changed,
        withdrawn=lines.withdrawn,
        amount=customers.change,
    )


def _measure(bills: Bills) -> dict[str, Row]:
    """Count and sum up all of it in one query."""
    change = _change("amount", "previous_amount")
    frames = [
        bills.purchases.agg(f.count("*").alias("rows"), f.count("reason").alias("of_quarantine")),
        bills.quarantined.agg(f.count("*").alias("rows")),
        _by_key(bills.lines, "lines", amount="amount"),
        _by_key(bills.invoices, "invoices", amount="amount", change=change),
        _by_key(bills.customers, "customers", change=_change("total", "known_total")),
    ]
    names = ("purchases", "quarantined", *KEYS)
    measured = [frame.withColumn("name", f.lit(name)) for name, frame in zip(names, frames, strict=True)]
    rows = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), measured).collect()
    return {row["name"]: row for row in rows}


def _by_key(frame: DataFrame, name: str, **sums: Column | str) -> DataFrame:
    """Count rows, keys and nulls of a frame, those that are marked, and sum up."""
    marks = {"of_input": "line_number IS NOT NULL", "changed": "is_changed", "withdrawn": "is_withdrawn"}
    known = {each: f.expr(mark) for each, mark in marks.items() if mark.split()[0] in frame.columns}
    counts = {each: f.count_if(mark) for each, mark in {**known, "nulls": _is_null(frame)}.items()}
    by_key = frame.groupBy(*KEYS[name]).agg(
        f.count("*").alias("rows"),
        *(count.alias(each) for each, count in counts.items()),
        *(f.sum(each).alias(what) for what, each in sums.items()),
    )
    return by_key.agg(
        f.count("*").alias("keys"),
        *(f.coalesce(f.sum(each), f.lit(0)).alias(each) for each in ("rows", *counts, *sums)),
    )


def _counts(bills: Bills, purchases: Row, lines: Row) -> Iterator[str]:
    if purchases.rows == lines.of_input + purchases.of_quarantine:
        return
    place = ["file", "line_number"]
    missing = bills.purchases.where("reason IS NULL").join(bills.lines, place, "left_anti").select(*place, "line")
    yield (
        f"test counts: {purchases.rows} lines of the input are {lines.of_input} lines of invoices and "
        f"{purchases.of_quarantine} in quarantine{_example(missing)}"
    )


def _sums(bills: Bills, lines: Row, invoices: Row, customers: Row) -> Iterator[str]:
    if lines.amount != invoices.amount:
        by_invoice = bills.lines.groupBy("invoice_id").agg(f.sum("amount").alias("amount_of_lines"))
        invoiced = bills.invoices.select("invoice_id", "amount")
        differing = by_invoice.join(invoiced, "invoice_id", "full").where("NOT (amount_of_lines <=> amount)")
        yield f"test sums: lines {lines.amount}, invoices {invoices.amount}{_example(differing)}"
    if invoices.change != customers.change:
        by_customer = bills.invoices.groupBy("customer_id").agg(
            f.sum(_change("amount", "previous_amount")).alias("invoiced")
        )
        totals = bills.customers.select("customer_id", "known_total", "total")
        counted = f.coalesce(_change("total", "known_total"), f.lit(NOTHING))
        differing = by_customer.join(totals, "customer_id", "full").where(~f.col("invoiced").eqNullSafe(counted))
        yield f"test sums: invoices change by {invoices.change}, totals by {customers.change}{_example(differing)}"


def _repeated(frame: DataFrame, name: str, measured: Row) -> Iterator[str]:
    if measured["keys"] == measured.rows:
        return
    repeated = frame.groupBy(*KEYS[name]).agg(f.count("*").alias("times")).where("times > 1")
    yield f"test uniqueness: {measured.rows} {name} have {measured['keys']} keys{_example(repeated)}"


def _nulls(frame: DataFrame, name: str, measured: Row) -> Iterator[str]:
    if measured.nulls:
        example = _example(frame.where(_is_null(frame)))
        yield f"test nulls: {measured.nulls} of {measured.rows} {name} have a null{example}"


def _withdrawn(bills: Bills, lines: Row) -> Iterator[str]:
    if lines.withdrawn:
        gone = bills.lines.where("is_withdrawn").select("invoice_id", "position")
        yield (
            f"test withdrawals: {lines.withdrawn} lines are billed that the input does not have any more, without "
            f"--withdraw{_example(gone)}"
        )


def _is_null(frame: DataFrame) -> Column:
    return f.expr(" OR ".join(f"{name} IS NULL" for name in frame.columns if name not in NULLABLE))


def _change(now: str, before: str) -> Column:
    return f.col(now) - f.coalesce(before, f.lit(NOTHING))


def _example(frame: DataFrame) -> str:
    row = frame.first()
    if row is None:
        return ""
    return f", for example {', '.join(f'{name} {value}' for name, value in row.asDict().items() if name != 'lines')}"
