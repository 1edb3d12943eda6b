"""The columns that a read gives: what they are in the table and in Spark, and the SELECT that fetches them."""

from collections.abc import Mapping

from psycopg.sql import SQL, Composable, Composed, Identifier
from pyspark.sql import types as spark

from outbox_spark.errors import ColumnError
from outbox_spark.reading.fields import FIELD_TYPES

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
    "written_as": TEXT,
}
# Spark has no UUID, and its dates of an instant follow the session's zone, while days of the outbox are of UTC.
COMPUTED = {
    "message_id": SQL("message.message_id::text"),
    "sent_day": SQL("(message.sent_at AT TIME ZONE 'UTC')::date"),
}

# A payload that is a text or a list has no fields. One that holds \u0000 or half of a surrogate pair has no fields
# either. json takes both, and json_to_record fails on them, in whichever field they are.
OBJECT = SQL(r"""
    CASE WHEN json_typeof(message.payload) = 'object' AND (
        strpos(message.payload::text, '\u') = 0
        OR regexp_replace(message.payload::text, '\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..', '', 'g')
            !~ '\\u(0000|[dD][89a-fA-F])'
    ) THEN message.payload END
""")


def schema_of(payload_schema: str | None) -> str:
    """Return the schema of a read that names no schema, as DDL, which Spark parses.

    Args:
        payload_schema: the fields of the payload as DDL; None: it stays text.
    """
    types = {name: kind.simpleString() for name, kind in COLUMNS.items()}
    if payload_schema is not None:
        types[PAYLOAD] = f"struct<{payload_schema}>"
    return ", ".join(f"{name} {kind}" for name, kind in types.items())


def expression(name: str) -> Composable:
    """Return a column as SQL; qualified, since a field of the payload may have the same name."""
    return COMPUTED.get(name) or Identifier("message", name)


def select(schema: spark.StructType, table: Identifier, *, fails_fast: bool) -> Composed:
    """Return `SELECT ... FROM ... WHERE true` for these columns: what is not named is not read.

    Fields of the payload come as columns of text, in its place: the executors make their types.

    Args:
        fails_fast: add what names a row without fields, its id and whether it is one, behind the last column.

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
                SQL(", ").join(SQL("{} text").format(Identifier(inner.name)) for inner in field.dataType.fields),
            )
        else:
            columns.append(expression(field.name))
    if fails_fast and any(isinstance(field.dataType, spark.StructType) for field in schema.fields):
        columns += [expression("id"), SQL("message.payload IS NOT NULL AND ({}) IS NULL").format(OBJECT)]
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
