"""Purchases as CDNOW wrote them down, read line by line: what is a purchase, and what is not and why.

A line is `customer  YYYYMMDD  number of CDs  dollars`, in columns of blanks; the first line may name them.
"""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f

HEADER = r"(?i)^\s*customer_id\s+date\s+number_of_cds\s+dollar_value\s*$"
BLANK = r"^\s*$"
FIELDS = r"^\s*(\S+)\s+(\S+)\s+(\S+)\s+(\S+)\s*$"
MAX_QUANTITY_DIGITS = 9  # of an integer
MAX_DOLLAR_DIGITS = 10  # of a numeric(12,2)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a file holds; every line is counted once more below `lines`."""

    lines: int
    headers: int
    blank: int
    purchases: int
    quarantined: int


def read_lines(spark: SparkSession, path: str) -> DataFrame:
    """Read every line with its file and its number there, from 1.

    Spark numbers no lines. It tells of each the split of the file that it stands in, and counts up within a split. So
    the lines of the splits before are all that is missing: counted in one pass over the file.
    """
    split = (f.col("_metadata.file_path"), f.col("_metadata.file_block_start"))
    lines = spark.read.text(path).select(
        f.col("value").alias("raw"),
        split[0].alias("file"),
        split[1].alias("split"),
        f.monotonically_increasing_id().alias("place"),
    )
    splits = lines.groupBy("file", "split").agg(f.count("*").alias("in_split"), f.min("place").alias("first"))
    earlier = Window.partitionBy("file").orderBy("split").rowsBetween(Window.unboundedPreceding, -1)
    before = splits.withColumn("before", f.coalesce(f.sum("in_split").over(earlier), f.lit(0)))
    numbered = lines.join(f.broadcast(before), ["file", "split"])
    return numbered.select("file", "raw", (f.col("before") + f.col("place") - f.col("first") + 1).alias("line_number"))


def parse(lines: DataFrame) -> DataFrame:
    """Return each line with its fields, or with the reason why it is no purchase.

    A header and a line of blanks are neither: they say nothing that could be lost.
    """
    # What is not UTF-8, or a NUL, fits no text column of PostgreSQL: the line is kept as near as can be.
    valid = lines.withColumn("line", f.translate(f.make_valid_utf8("raw"), "\0", "\N{REPLACEMENT CHARACTER}"))
    fields = {
        name: f.regexp_extract("line", FIELDS, place)
        for place, name in enumerate(("customer_text", "date_text", "quantity_text", "amount_text"), start=1)
    }
    says_nothing = {
        "is_header": (f.col("line_number") == 1) & f.col("line").rlike(HEADER),
        "is_blank": f.col("line").rlike(BLANK),
    }
    split = valid.withColumns(fields).withColumns(says_nothing)
    return split.select(
        "file",
        "line_number",
        "line",
        "is_header",
        "is_blank",
        f.when(~f.col("is_header") & ~f.col("is_blank"), _reason()).alias("reason"),
        f.col("customer_text").alias("customer_id"),
        _date().alias("issued_on"),
        f.col("quantity_text").try_cast("int").alias("quantity"),
        f.col("amount_text").try_cast("decimal(12, 2)").alias("amount"),
    )


def count(parsed: DataFrame) -> Counts:
    """Count in one pass what a file holds."""
    row = parsed.agg(
        f.count("*").alias("lines"),
        f.count_if("is_header").alias("headers"),
        f.count_if("is_blank").alias("blank"),
        f.count_if(_is_purchase()).alias("purchases"),
        f.count("reason").alias("quarantined"),
    ).first()
    return Counts(**row.asDict())


def quarantined(parsed: DataFrame) -> DataFrame:
    """Return the lines that are no purchase."""
    return parsed.where(f.col("reason").isNotNull()).select("file", "line_number", "reason", "line")


def invoices(parsed: DataFrame, partitions: int) -> DataFrame:
    """Make an invoice of each purchase; all of a customer in one partition, in the order of day and line.

    The id follows from the purchase: customer, day, and which of that day it was. So it is the same in every run,
    and a purchase that came in another batch already is refused by the primary key.
    """
    purchases = parsed.where(_is_purchase())
    of_the_day = Window.partitionBy("customer_id", "issued_on").orderBy("file", "line_number")
    together = purchases.repartition(partitions, "customer_id")
    numbered = together.withColumn("number", f.row_number().over(of_the_day))
    day = f.date_format("issued_on", "yyyyMMdd")
    identified = numbered.withColumn("invoice_id", f.concat_ws("-", "customer_id", day, "number"))
    ordered = identified.sortWithinPartitions("customer_id", "issued_on", "number")
    return ordered.select("invoice_id", "customer_id", "issued_on", "quantity", "amount")


def _is_purchase() -> Column:
    return f.col("reason").isNull() & ~f.col("is_header") & ~f.col("is_blank")


def _reason() -> Column:
    """Return the first thing wrong with a line; NULL when it is a purchase."""
    quantity, amount = f.col("quantity_text"), f.col("amount_text")
    return (
        f.when(~f.is_valid_utf8("raw"), "is not UTF-8")
        .when(f.col("raw").contains("\0"), "holds a NUL character")
        .when(~f.col("line").rlike(FIELDS), "has not four fields")
        .when(~f.col("customer_text").rlike("^[0-9]{1,20}$"), "customer id is no number")
        .when(_date().isNull(), "date is no day written YYYYMMDD")
        .when(_date() > f.current_date(), "date is in the future")
        .when(~quantity.rlike(rf"^[0-9]{{1,{MAX_QUANTITY_DIGITS}}}$"), "number of CDs is no whole number")
        .when(quantity.try_cast("int") == 0, "number of CDs is zero")
        .when(amount.rlike(r"^-[0-9.]+$"), "amount is negative")
        .when(~amount.rlike(r"^[0-9]+(\.[0-9]+)?$"), "amount is no decimal number")
        .when(~amount.rlike(r"^[0-9]+(\.[0-9]{1,2})?$"), "amount has more than two decimals")
        .when(~amount.rlike(rf"^0*[0-9]{{1,{MAX_DOLLAR_DIGITS}}}(\.|$)"), "amount is too large")
    )


def _date() -> Column:
    # try_to_timestamp reads other shapes too, so the digits are looked at first. Spark 4.0 has no try_to_date.
    text = f.col("date_text")
    return f.when(text.rlike("^[0-9]{8}$"), f.try_to_timestamp(text, f.lit("yyyyMMdd")).cast("date"))
