"""A day's bills: what its purchases come to, next to what is written of them already, and so what must be written.

input ──> purchases ──> lines ──> invoices ──> customers ──> tiers reached      each next to what is known of it
             └──> quarantined
"""

from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import reduce
from operator import add

from psycopg.sql import SQL, Composable, Identifier, Literal
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from outbox_spark import differences
from outbox_spark.reading.table import Database, read_table

TIERS = (("silver", Decimal(100)), ("gold", Decimal(500)), ("platinum", Decimal(1000)))  # the lowest first
MONEY = "decimal(22, 2)"

LINES = "invoice_id string, position int, customer_id string, quantity int, amount decimal(12, 2)"
INVOICES = f"invoice_id string, revision int, amount {MONEY}"
CUSTOMERS = f"customer_id string, total {MONEY}, tiers_reached int"
QUARANTINE = "file string, line_number long, line string"


@dataclass(frozen=True, slots=True)
class Known:
    """What the tables have of a day, and of all customers."""

    lines: DataFrame
    invoices: DataFrame
    customers: DataFrame
    quarantine: DataFrame


@dataclass(frozen=True, slots=True)
class Bills:
    """A day as it ought to be. `is_changed` marks what is not written yet."""

    purchases: DataFrame  # lines of the input that are of the day, or of no day, whether they are purchases or not
    quarantined: DataFrame  # of these, what is not written yet
    lines: DataFrame
    invoices: DataFrame
    customers: DataFrame  # those whose total changes, or who are new


def read_known(spark: SparkSession, database: Database, day: date) -> Known:
    """Read what is written of a day."""
    of_day = SQL("issued_on = {}").format(Literal(day))

    def read(table: str, schema: str, where: Composable | None = None, partitions: int | None = None) -> DataFrame:
        return read_table(spark, database, Identifier("sales", table), schema, where=where, partitions=partitions)

    return Known(
        lines=read("invoice_line", LINES, of_day, 1),
        invoices=read("invoice", INVOICES, of_day, 1),
        customers=read("customer", CUSTOMERS),
        quarantine=read("quarantine", QUARANTINE, SQL("({} OR issued_on IS NULL)").format(of_day), 1),
    )


def of_days(parsed: DataFrame, first: date, last: date) -> DataFrame:
    """Return the lines of these days, and those whose day cannot be read. Headers and blank lines are left out."""
    says_something = ~f.col("is_header") & ~f.col("is_blank")
    return parsed.where(says_something & (f.col("issued_on").between(first, last) | f.col("issued_on").isNull()))


def bill(parsed: DataFrame, known: Known, day: date) -> Bills:
    """Bill a day. Each frame is computed once, also when an executor is lost: checked is what is written."""
    purchases = of_days(parsed, day, day)
    refused = purchases.where("reason IS NOT NULL")
    lines = _lines(purchases.where("reason IS NULL"), known.lines)
    invoices = _invoices(lines, known.invoices).localCheckpoint()
    return Bills(
        purchases=purchases,
        quarantined=refused.join(known.quarantine, known.quarantine.columns, "left_anti").localCheckpoint(),
        lines=lines,
        invoices=invoices,
        customers=_customers(invoices, known.customers).localCheckpoint(),
    )


def reached(customers: DataFrame) -> DataFrame:
    """Return each tier that a customer reaches now, the lowest first: one purchase may pass several."""
    tiers = f.array(
        *(f.struct(f.lit(name).alias("tier"), f.lit(threshold).alias("threshold")) for name, threshold in TIERS)
    )
    new = f.slice(tiers, f.col("known_tiers") + 1, f.col("tiers_reached") - f.col("known_tiers"))
    return customers.select("customer_id", "total", f.explode(new).alias("tier")).select(
        "customer_id", "total", "tier.*"
    )


def _lines(purchases: DataFrame, known: DataFrame) -> DataFrame:
    """Number a customer's purchases of the day as they stand in the input; one that is gone keeps its place, empty."""
    as_it_stands = Window.partitionBy("customer_id").orderBy("file", "line_number")
    found = purchases.select(
        f.concat_ws("-", "customer_id", f.date_format("issued_on", "yyyyMMdd")).alias("invoice_id"),
        f.row_number().over(as_it_stands).alias("position"),
        *("customer_id", "quantity", "amount", "file", "line_number"),
    )
    both = differences(
        found,
        known.where("quantity > 0"),
        key_columns=["invoice_id", "position"],
        compared_columns=["quantity", "amount"],
        with_unchanged=True,  # they add up to the invoice, too
    )
    return both.select(
        *("invoice_id", "position"),
        f.coalesce("after.customer_id", "before.customer_id").alias("customer_id"),
        f.coalesce("after.quantity", f.lit(0)).alias("quantity"),
        f.coalesce("after.amount", f.lit(Decimal("0.00"))).cast("decimal(12, 2)").alias("amount"),
        *("after.file", "after.line_number"),
        (f.col("change") != "unchanged").alias("is_changed"),
        (f.col("change") == "withdrawn").alias("is_withdrawn"),
    )


def _invoices(lines: DataFrame, known: DataFrame) -> DataFrame:
    """Sum up the lines of each invoice."""
    line = f.when(f.col("quantity") > 0, f.struct("position", "quantity", "amount"))
    summed = lines.groupBy("invoice_id").agg(
        f.min("customer_id").alias("customer_id"),
        f.sum("quantity").alias("quantity"),
        f.sum("amount").cast(MONEY).alias("amount"),
        f.sort_array(f.collect_list(line)).alias("lines"),
        f.bool_or("is_changed").alias("is_changed"),
    )
    before = known.select("invoice_id", f.col("revision").alias("before"), f.col("amount").alias("previous_amount"))
    revision = f.coalesce("before", f.lit(0)) + f.col("is_changed").cast("int")
    return summed.join(before, "invoice_id", "left").withColumn("revision", revision).drop("before")


def _customers(invoices: DataFrame, known: DataFrame) -> DataFrame:
    """Add what has changed to the customers' totals. A tier once reached stays, whatever is corrected later."""
    nothing = f.lit(Decimal("0.00"))
    changes = invoices.where("is_changed").select(
        "customer_id", (f.col("amount") - f.coalesce("previous_amount", nothing)).alias("change")
    )
    before = known.select(
        "customer_id", f.col("total").alias("known_total"), f.col("tiers_reached").alias("known_tiers")
    )
    summed = changes.join(before, "customer_id", "left").select(
        *("customer_id", "change", "known_total"),
        f.coalesce("known_tiers", f.lit(0)).alias("known_tiers"),
        (f.coalesce("known_total", nothing) + f.col("change")).cast(MONEY).alias("total"),
    )
    by_total = reduce(add, ((f.col("total") >= threshold).cast("int") for _, threshold in TIERS))
    return summed.where("known_total IS NULL OR change <> 0").withColumn(
        "tiers_reached", f.greatest("known_tiers", by_total)
    )
