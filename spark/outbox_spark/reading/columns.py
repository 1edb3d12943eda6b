"""The columns that a read gives: what they are in the table and in Spark, and the SELECT that fetches them."""

from collections.abc import Mapping

from psycopg.sql import SQL, Composable, Composed, Identifier
from pyspark.sql import types as spark

from outbox_spark.errors import ColumnError

TEXT, LONG, SHORT, MOMENT = spark.StringType(), spark.LongType(), spark.ShortType(), spark.TimestampType()
PAYLOAD = "payload"

COLUMNS: Mapping[str, spark.DataType] = {
    "id": LONG,
    "message_id": TEXT,
    "aggregate_type": TEXT,
    "aggregate_id": TEXT,
    "event_type": TEXT,
    "exchange": TEXT,
    "routing_key": TEXT,
    "headers": TEXT,
    "content_type": TEXT,
    PAYLOAD: TEXT,  # or a struct of its fields
    "payload_bytes": spark.BinaryType(),
    "created_at": MOMENT,
    "lane": SHORT,
    "state": TEXT,
    "attempts": SHORT,
    "available_at": MOMENT,
    "last_error": TEXT,
    "held_behind": LONG,
    "parked_at": MOMENT,
    "quarantine": LONG,
    "sent_at": MOMENT,
    "sent_day": spark.DateType(),
    "writer": TEXT,
    "batch_id": LONG,
    "trace_context": TEXT,
}
# Spark has no UUID, and its dates of an instant follow the session's zone, while days of the outbox are of UTC.
COMPUTED = {
    "message_id": SQL("message.message_id::text"),
    "sent_day": SQL("(message.sent_at AT TIME ZONE 'UTC')::date"),
}

# Which a payload need not be: null, a text or a list has no fields, and would fail all of the read.
OBJECT = SQL("CASE json_typeof(message.payload) WHEN 'object' THEN message.payload END")

# As which type the database takes a field out of the JSON. A decimal comes as it stands there: the executor refuses
# what does not fit, where numeric(12,2) would round.
FIELD_TYPES: Mapping[type[spark.DataType], str] = {
    spark.StringType: "text",
    spark.BooleanType: "boolean",
    spark.ByteType: "smallint",
    spark.ShortType: "smallint",
    spark.IntegerType: "integer",
    spark.LongType: "bigint",
    spark.FloatType: "real",
    spark.DoubleType: "double precision",
    spark.DecimalType: "numeric",
    spark.DateType: "date",
    spark.TimestampType: "timestamptz",
    spark.TimestampNTZType: "timestamp",
}


def schema_of(payload_schema: str | None) -> str:
    """Give the schema of a read that names none, as DDL, which Spark parses.

    Args:
        payload_schema: the fields of the payload as DDL; None: it stays text.
    """
    types = {name: kind.simpleString() for name, kind in COLUMNS.items()}
    if payload_schema is not None:
        types[PAYLOAD] = f"struct<{payload_schema}>"
    return ", ".join(f"{name} {kind}" for name, kind in types.items())


def expression(name: str) -> Composable:
    """Give a column as SQL; qualified, since a field of the payload may have the same name."""
    return COMPUTED.get(name) or Identifier("message", name)


def select(schema: spark.StructType, table: Identifier) -> Composed:
    """Give `SELECT ... FROM ... WHERE true` for these columns: what is not named is not read.

    Fields of the payload come as columns of their own, in its place.

    Raises:
        ColumnError: with every column that cannot be, by name.
    """
    faults = [*_faults(schema)]
    if faults:
        raise ColumnError("; ".join(faults))
    columns: list[Composable] = []
    source: Composable = SQL("{} AS message").format(table)
    for field in schema.fields:
        if isinstance(field.dataType, spark.StructType):
            columns += [SQL("content.{}").format(Identifier(inner.name)) for inner in field.dataType.fields]
            source = SQL("{} CROSS JOIN LATERAL json_to_record({}) AS content ({})").format(
                source,
                OBJECT,
                SQL(", ").join(
                    SQL("{} {}").format(Identifier(inner.name), SQL(FIELD_TYPES[type(inner.dataType)]))
                    for inner in field.dataType.fields
                ),
            )
        else:
            columns.append(expression(field.name))
    return SQL("SELECT {} FROM {} WHERE true").format(SQL(", ").join(columns), source)


def _faults(schema: spark.StructType) -> list[str]:
    faults = []
    for field in schema.fields:
        if field.name not in COLUMNS:
            faults.append(f"column {field.name!r} is unknown; known are {', '.join(COLUMNS)}")
        elif field.name == PAYLOAD and isinstance(field.dataType, spark.StructType):
            faults += [
                f"field {inner.name!r} of the payload cannot be read as {inner.dataType.simpleString()}: "
                "read the payload as text and take it out with from_json()"
                for inner in field.dataType.fields
                if type(inner.dataType) not in FIELD_TYPES
            ]
            if not field.dataType.fields:
                faults.append("payloadSchema names no field")
        elif field.dataType != COLUMNS[field.name]:
            wanted = COLUMNS[field.name].simpleString()
            faults.append(f"column {field.name!r} is {wanted}, not {field.dataType.simpleString()}")
    return faults
