"""Which types fit: a column of a DataFrame a column of a table or of an event, by the types alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pyspark.sql import types as spark

from outbox_spark.spark_api import TIME_TYPES

INTEGER_DIGITS = {spark.ByteType: 3, spark.ShortType: 5, spark.IntegerType: 10, spark.LongType: 19}
INTEGER_BYTES = {spark.ByteType: 1, spark.ShortType: 2, spark.IntegerType: 4, spark.LongType: 8}
INTEGERS = {"int2": 2, "int4": 4, "int8": 8}

# Each of these holds every value of the Spark type. Timestamp is an instant and needs a zone; TimestampNTZ has no zone.
EXACT = {
    spark.FloatType: {"float4", "float8"},
    spark.DoubleType: {"float8"},
    spark.BooleanType: {"bool"},
    spark.DateType: {"date"},
    spark.TimestampType: {"timestamptz"},
    spark.TimestampNTZType: {"timestamp"},
    **{kind: {"time"} for kind in TIME_TYPES},
    spark.BinaryType: {"bytea"},
    spark.StringType: {"text", "varchar", "bpchar", "json", "jsonb", "uuid"},
}
WITH_SPARK_TYPE = frozenset({*INTEGERS, "numeric", *(kind for kinds in EXACT.values() for kind in kinds)})
NESTED = (spark.StructType, spark.MapType, spark.ArrayType)
IN_JSON = (*INTEGER_BYTES, *EXACT, spark.DecimalType)
TIME_DIGITS = 6  # after the point of a second, of PostgreSQL and in JSON; Spark's time has up to 9
AS_KEY = (*INTEGER_BYTES, spark.StringType, spark.DateType, spark.DecimalType)
MESSAGE_KEY = "message_key"  # the column that message ids are made of


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the business table."""

    name: str
    type: str  # as SQL writes it: numeric(12,2)
    kind: str  # the name of the type alone: numeric
    is_builtin: bool
    unlimited: str  # the type without its modifier, as SQL writes it, and beneath a domain: numeric
    limited: str  # the same with its modifier: numeric(12,2)
    modifier: int
    not_null: bool
    has_default: bool
    is_generated: bool
    is_unique: bool  # by an index on this column alone
    may_insert: bool

    @property
    def precision_and_scale(self) -> tuple[int, int] | None:
        """Digits and digits after the point of a numeric; None when it takes any."""
        if self.kind != "numeric" or self.modifier < 0:
            return None
        scale = (self.modifier - 4) & 0x7FF
        return (self.modifier - 4) >> 16 & 0xFFFF, scale - 0x800 if scale >= 0x400 else scale

    @property
    def max_characters(self) -> int | None:
        """How long a varchar or char may be, also in an array; None when it may be any length."""
        is_bounded = self.kind.removeprefix("_") in {"varchar", "bpchar"} and self.modifier >= 4
        return self.modifier - 4 if is_bounded else None

    @property
    def max_digits(self) -> int | None:
        """How many digits a timestamp has after the point of its seconds; None when it has all of Spark's."""
        is_timestamp = self.kind.removeprefix("_") in {"timestamp", "timestamptz"}
        return self.modifier if is_timestamp and self.modifier >= 0 else None

    @property
    def has_spark_type(self) -> bool:
        """Whether some type of Spark's is exactly this one."""
        return self.is_builtin and self.kind.removeprefix("_") in WITH_SPARK_TYPE


def is_text_for(data_type: spark.DataType, column: TableColumn) -> bool:
    """Whether it is text of which the commit makes what no type of Spark's is."""
    if isinstance(data_type, spark.ArrayType) and column.kind.startswith("_"):
        return isinstance(data_type.elementType, spark.StringType)
    return isinstance(data_type, spark.StringType)


def fits(data_type: spark.DataType, column: TableColumn) -> bool:
    kind = type(data_type)
    if kind in INTEGER_BYTES:
        if column.kind in INTEGERS:
            return bool(INTEGER_BYTES[kind] <= INTEGERS[column.kind])
        return column.kind == "numeric" and _digits_fit(INTEGER_DIGITS[kind], 0, column)
    if isinstance(data_type, spark.DecimalType):
        return column.kind == "numeric" and _digits_fit(data_type.precision, data_type.scale, column)
    if isinstance(data_type, NESTED) and column.kind in {"json", "jsonb"}:
        return is_json(data_type)
    if isinstance(data_type, spark.ArrayType):
        # PostgreSQL names the type of an array with an underscore; the modifier is that of its elements. Arrow makes
        # no lists of its JSON type, which jsonb takes.
        element = replace(column, kind=column.kind.removeprefix("_"))
        is_plain = column.kind.startswith("_") and not isinstance(data_type.elementType, NESTED)
        return is_plain and element.kind != "jsonb" and fits(data_type.elementType, element)
    # A modifier of -1 is that of a plain `time`, with all digits; COPY would round to those of another.
    return column.kind in EXACT.get(kind, ()) and _time_fits(
        data_type, TIME_DIGITS if column.modifier < 0 else column.modifier
    )


def _time_fits(data_type: spark.DataType, digits: int) -> bool:
    """Whether a time has at most these digits after the point; true of any other type."""
    return not isinstance(data_type, TIME_TYPES) or bool(data_type.precision <= digits)


def _digits_fit(precision: int, scale: int, column: TableColumn) -> bool:
    limits = column.precision_and_scale
    if limits is None:
        return True
    return scale <= limits[1] and precision - scale <= limits[0] - limits[1]


def is_json(data_type: spark.DataType) -> bool:
    """Whether every part of a value has JSON."""
    if isinstance(data_type, spark.StructType):
        return all(is_json(field.dataType) for field in data_type.fields)
    if isinstance(data_type, spark.ArrayType):
        return is_json(data_type.elementType)
    if isinstance(data_type, spark.MapType):
        return isinstance(data_type.keyType, AS_KEY) and is_json(data_type.valueType)
    return isinstance(data_type, IN_JSON) and _time_fits(data_type, TIME_DIGITS)


def _is_payload(data_type: spark.DataType) -> bool:
    return isinstance(data_type, (spark.StringType, spark.BinaryType, *NESTED)) and is_json(data_type)


def _is_headers(data_type: spark.DataType) -> bool:
    return isinstance(data_type, spark.StringType) or data_type.simpleString() == "map<string,string>"


def takes_of(field: str) -> tuple[Callable[[spark.DataType], bool], str]:
    """Return which types a column of an event takes, as a check and in words."""
    if field == "payload":
        return _is_payload, "a string of JSON, bytes, or a struct, map or array"
    if field == "headers":
        return _is_headers, "a map of strings, or a string that is a JSON object"
    if field == "available_at":
        return lambda data_type: isinstance(data_type, spark.TimestampType), "a timestamp"
    if field in {"aggregate_id", MESSAGE_KEY}:
        return lambda data_type: isinstance(data_type, AS_KEY), "a string, whole number, decimal or date"
    return lambda data_type: isinstance(data_type, spark.StringType), "a string"
