"""Count and checksum of sent rows, computed by PostgreSQL over the table and by Spark over what was written.

The two sides share no code: each writes a row as text: which columns are NULL, and then the others. It takes SHA-256 of
that text, and adds up the first 60 bits, so that the order of the rows does not count. A row that is missing, doubled
or changed in any column shows.
"""

from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import reduce
from operator import add

import psycopg
from psycopg.sql import SQL, Composable, Identifier, Literal
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as spark

from outbox_spark.reading.columns import COLUMNS

# The day is the folder's name, and rows of the archive are sent.
ARCHIVED = {name: kind for name, kind in COLUMNS.items() if name not in {"sent_day", "state"}}
DIVIDES = "\x1f"
NULL_BITS = [(name, 1 << at) for at, name in enumerate(ARCHIVED)]  # of the number that tells what is NULL
HALF = 30  # bits

SUM_UP = SQL("""
    SELECT event_type, count(*),
        sum(('x' || left(encode(sha256(convert_to({row}, 'UTF8')), 'hex'), 15))::bit(60)::bigint)
    FROM {schema}.sent({day}::date::timestamp AT TIME ZONE 'UTC', ({day}::date + 1)::timestamp AT TIME ZONE 'UTC')
    GROUP BY event_type
""")


@dataclass(frozen=True, slots=True)
class Sum:
    """What rows of a type come to."""

    rows: int
    checksum: Decimal


Sums = dict[str, Sum]  # by event type


def table_sums(connection: psycopg.Connection, schema: str, day: date) -> Sums:
    """Sum up a day of the table."""
    nulls = SQL(" + ").join(
        SQL("CASE WHEN {} IS NULL THEN {} ELSE 0 END").format(Identifier(name), Literal(bit)) for name, bit in NULL_BITS
    )
    columns = SQL(", ").join(_as_sql(name, kind) for name, kind in ARCHIVED.items())
    row = SQL("concat_ws({}, {}, {})").format(Literal(DIVIDES), nulls, columns)  # it leaves out what is NULL
    sums = connection.execute(SUM_UP.format(schema=Identifier(schema), day=Literal(day), row=row))
    return {event_type: Sum(count, Decimal(checksum)) for event_type, count, checksum in sums}


def frame_sums(rows: DataFrame) -> Sums:
    """Sum up a DataFrame that has the columns of the archive."""
    number = row_number()
    # As two long ones: a sum of decimals takes Spark three times as long.
    halves = f.sum(f.shiftright(number, HALF)), f.sum(number.bitwiseAND(2**HALF - 1))
    by_type = rows.groupBy("event_type").agg(f.count("*"), *halves)
    return {each[0]: Sum(each[1], Decimal((each[2] << HALF) + each[3])) for each in by_type.collect()}


def row_number() -> Column:
    """Return the number that a row adds to the checksum."""
    nulls = reduce(add, (f.when(f.isnull(name), bit).otherwise(0) for name, bit in NULL_BITS))
    columns = (_as_column(name, kind) for name, kind in ARCHIVED.items())
    row = f.concat_ws(DIVIDES, nulls.cast("string"), *columns)  # it leaves out what is NULL
    start = f.substring(f.sha2(f.encode(row, "UTF-8"), 256), 1, 15)
    return f.conv(start, 16, 10).cast("long")


def _as_sql(name: str, kind: spark.DataType) -> Composable:
    column = Identifier(name)
    match kind:
        case spark.TimestampType():
            return SQL("(extract(epoch FROM {}) * 1000000)::bigint").format(column)
        case spark.BinaryType():
            return SQL("encode({}, 'hex')").format(column)
        case _:
            return column


def _as_column(name: str, kind: spark.DataType) -> Column:
    column = f.col(name)
    match kind:
        case spark.TimestampType():
            return f.unix_micros(column).cast("string")
        case spark.BinaryType():
            return f.lower(f.hex(column))
        case _:
            return column.cast("string")
