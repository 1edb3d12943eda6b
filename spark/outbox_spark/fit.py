"""Whether a DataFrame fits the tables, decided on the driver from types alone, before any task runs."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from pyspark.sql import types as spark

from outbox_spark.errors import ColumnError
from outbox_spark.options import WriteOptions
from outbox_spark.plan import BusinessColumn, EventPlan, Plan
from outbox_spark.tables import Table, TableColumn

INTEGER_DIGITS = {spark.ByteType: 3, spark.ShortType: 5, spark.IntegerType: 10, spark.LongType: 19}
INTEGER_BYTES = {spark.ByteType: 1, spark.ShortType: 2, spark.IntegerType: 4, spark.LongType: 8}
INTEGERS = {"int2": 2, "int4": 4, "int8": 8}
# Each of these holds every value of the Spark type. Timestamp is an instant and needs a zone; TimestampNTZ has none.
EXACT = {
    spark.FloatType: {"float4", "float8"},
    spark.DoubleType: {"float8"},
    spark.BooleanType: {"bool"},
    spark.DateType: {"date"},
    spark.TimestampType: {"timestamptz"},
    spark.TimestampNTZType: {"timestamp"},
    spark.TimeType: {"time"},
    spark.BinaryType: {"bytea"},
    spark.StringType: {"text", "varchar", "bpchar", "json", "jsonb", "uuid"},
}
NESTED = (spark.StructType, spark.MapType, spark.ArrayType)
IN_JSON = (*INTEGER_BYTES, *EXACT, spark.DecimalType)
TIME_DIGITS = 6  # after the point of a second, of PostgreSQL and in JSON; Spark's time has up to 9
EVENT_TEXTS = ("aggregate_type", "aggregate_id", "event_type", "exchange", "routing_key", "content_type")
MESSAGE_KEY = "message_key"  # the column that message ids are made of
EVENT_FIELDS = ("message_id", *EVENT_TEXTS, "headers", "payload", MESSAGE_KEY)
FIELD_OF_OPTION = {
    "aggregateIdColumn": "aggregate_id",
    "sequenceColumn": MESSAGE_KEY,
    "payloadColumn": "payload",
    "headersColumn": "headers",
}
AS_KEY = (*INTEGER_BYTES, spark.StringType, spark.DateType, spark.DecimalType)

Fields = dict[str, tuple[int, spark.DataType]]  # by name: the place in the DataFrame, and the type


def plan_write(schema: spark.StructType, table: Table, options: WriteOptions) -> Plan:
    """Decide which column goes where, when each row is a row of the table and an event.

    Raises:
        ColumnError: with every fault at once, each naming its column.
    """
    fields = _fields(schema)
    faults = _named_twice(schema) + _missing(fields, options)
    named = {*options.named_columns().values(), *options.payload_columns}
    columns = _business_columns(fields, table, faults, others=named)
    payload = _payload(columns, options)
    faults += _unfit_for_event(fields, payload, options)
    sequence = options.sequence_column
    unique = {column.name for column in table.columns if column.is_unique}
    if options.pieces is not None and sequence is not None and sequence not in unique:
        faults.append(
            f"column {sequence!r} of option sequenceColumn has no unique index of its own in {table}, and nobody looks "
            "over all partitions when each is its own transaction: make one, or write with atomic=batch"
        )
    _raise(faults)
    same = {
        "aggregate_type": options.aggregate_type,
        "event_type": options.event_type,
        "exchange": options.exchange,
        "routing_key": options.routing_key,
        "content_type": options.content_type,
    }
    event = EventPlan(
        texts={"aggregate_id": fields[options.aggregate_id_column][0]},
        same={name: value for name, value in same.items() if value is not None},
        payload=tuple(fields[name][0] for name in payload),
        payload_is_whole=options.payload_column is not None,
        headers=None if options.headers_column is None else fields[options.headers_column][0],
        sequence=None if sequence is None else fields[sequence][0],
        sequence_is_unique=sequence is None or sequence in unique,
    )
    return Plan((table.schema, table.name), tuple(columns), event=event)


def plan_rows(schema: spark.StructType, table: Table, keys: tuple[str, ...]) -> Plan:
    """Decide which column goes where, when each row is a row of the table, new or with keys that it has already.

    Raises:
        ColumnError: with every fault at once, each naming its column.
    """
    fields = _fields(schema)
    faults = _named_twice(schema)
    columns = _business_columns(fields, table, faults)
    faults += [f"column {name!r} of key_columns is not in the DataFrame" for name in keys if name not in fields]
    if keys and frozenset(keys) not in table.unique:
        faults.append(f"key_columns {', '.join(keys)}: no unique index of {table} is on just these columns")
    if keys and not table.may_update:
        faults.append(f"{table} may not be updated by this user, as mode upsert does")
    _raise(faults)
    # A NULL is no other row's NULL to a unique index: what has one would be inserted again by every run.
    columns = [replace(column, not_null=column.not_null or column.name in keys) for column in columns]
    return Plan((table.schema, table.name), tuple(columns), keys=keys)


def plan_events(schema: spark.StructType, same: Mapping[str, str], *, number: int) -> Plan:
    """Decide what becomes of the columns of a DataFrame whose names are those of outbox.message.

    Args:
        same: what all rows have in common.
        number: how many DataFrames of events came before.
    Raises:
        ColumnError: with every fault at once, each naming its column.
    """
    fields = _fields(schema)
    faults = _named_twice(schema)
    unknown = fields.keys() - set(EVENT_FIELDS)
    faults += [f"column {name!r} is none of an event's: {', '.join(EVENT_FIELDS)}" for name in sorted(unknown)]
    if MESSAGE_KEY in fields and "message_id" in fields:
        faults.append(f"message_id and {MESSAGE_KEY} exclude each other")
    for name in ("aggregate_type", "event_type", "payload"):
        if name not in fields and name not in same:
            faults.append(f"{name} is missing: give it, or a column of that name")
    for name, (_, data_type) in fields.items():
        does_take, takes = _takes(name)
        if name not in unknown and not does_take(data_type):
            faults.append(f"column {name!r} takes {takes}, not {data_type.simpleString()}")
    _raise(faults)
    places = {name: place for name, (place, _) in fields.items()}
    event = EventPlan(
        texts={name: places[name] for name in EVENT_TEXTS if name in places},
        same=dict(same),
        payload=(places["payload"],),
        payload_is_whole=True,
        headers=places.get("headers"),
        message_id=places.get("message_id"),
        sequence=places.get(MESSAGE_KEY),
        sequence_is_unique=MESSAGE_KEY not in places,
        number=number,
        id_tells_batch=MESSAGE_KEY not in places,
    )
    return Plan(event=event)


def _fields(schema: spark.StructType) -> Fields:
    return {field.name: (index, field.dataType) for index, field in enumerate(schema.fields)}


def _raise(faults: list[str]) -> None:
    if faults:
        raise ColumnError("; ".join(faults))


def _business_columns(
    fields: Fields, table: Table, faults: list[str], *, others: Collection[str] = ()
) -> list[BusinessColumn]:
    target = {column.name: column for column in table.columns}
    columns = []
    for name, (index, data_type) in fields.items():
        if name in target:
            column = target[name]
            faults += _misfit(name, data_type, column, table)
            columns.append(
                BusinessColumn(name, index, column.type, column.kind, column.not_null, column.max_characters)
            )
        elif name not in others:
            faults.append(f"column {name!r} is not in {table}, and no option names it")
    faults += [
        f"column {column.name!r} of {table} is NOT NULL without a default, and the DataFrame has no such column"
        for column in table.columns
        if column.not_null and not column.has_default and not column.is_generated and column.name not in fields
    ]
    if not columns:
        faults.append(f"no column of the DataFrame is in {table}")
    return columns


def _is_json(data_type: spark.DataType) -> bool:
    """Tell whether a value can be told in JSON, all of it."""
    if isinstance(data_type, spark.StructType):
        return all(_is_json(field.dataType) for field in data_type.fields)
    if isinstance(data_type, spark.ArrayType):
        return _is_json(data_type.elementType)
    if isinstance(data_type, spark.MapType):
        return isinstance(data_type.keyType, AS_KEY) and _is_json(data_type.valueType)
    return isinstance(data_type, IN_JSON) and _time_fits(data_type, TIME_DIGITS)


def _is_payload(data_type: spark.DataType) -> bool:
    return isinstance(data_type, (spark.StringType, *NESTED)) and _is_json(data_type)


def _is_headers(data_type: spark.DataType) -> bool:
    return isinstance(data_type, spark.StringType) or data_type.simpleString() == "map<string,string>"


def _takes(field: str) -> tuple[Callable[[spark.DataType], bool], str]:
    """Tell of a column of an event which types it takes, and in words."""
    if field == "payload":
        return _is_payload, "a string of JSON, or a struct, map or array"
    if field == "headers":
        return _is_headers, "a map of strings, or a string that is a JSON object"
    if field in {"aggregate_id", MESSAGE_KEY}:
        return lambda data_type: isinstance(data_type, AS_KEY), "a string, whole number, decimal or date"
    return lambda data_type: isinstance(data_type, spark.StringType), "a string"


def _named_twice(schema: spark.StructType) -> list[str]:
    names = schema.fieldNames()
    return [
        f"column {name!r} is in the DataFrame more than once" for name in sorted(set(names)) if names.count(name) > 1
    ]


def _missing(fields: Fields, options: WriteOptions) -> list[str]:
    named = [*options.named_columns().items(), *(("payloadColumns", name) for name in options.payload_columns)]
    return [
        f"column {name!r} of option {option} is not in the DataFrame" for option, name in named if name not in fields
    ]


def _payload(columns: list[BusinessColumn], options: WriteOptions) -> tuple[str, ...]:
    if options.payload_column is not None:
        return (options.payload_column,)
    return options.payload_columns or tuple(column.name for column in columns)


def _misfit(name: str, data_type: spark.DataType, column: TableColumn, table: Table) -> list[str]:
    if column.is_generated:
        return [f"column {name!r} of {table} is generated by the database and cannot be written"]
    if not column.may_insert:
        return [f"column {name!r} of {table} may not be written by this user"]
    if column.is_builtin and _fits(data_type, column):
        return []
    both = f"{data_type.simpleString()} in the DataFrame and {column.type} in {table}"
    return [f"column {name!r} is {both}: not every value fits unchanged, cast it first"]


def _fits(data_type: spark.DataType, column: TableColumn) -> bool:
    kind = type(data_type)
    if kind in INTEGER_BYTES:
        if column.kind in INTEGERS:
            return bool(INTEGER_BYTES[kind] <= INTEGERS[column.kind])
        return column.kind == "numeric" and _digits_fit(INTEGER_DIGITS[kind], 0, column)
    if isinstance(data_type, spark.DecimalType):
        return column.kind == "numeric" and _digits_fit(data_type.precision, data_type.scale, column)
    if isinstance(data_type, NESTED) and column.kind in {"json", "jsonb"}:
        return _is_json(data_type)
    if isinstance(data_type, spark.ArrayType):
        # PostgreSQL names the type of an array with an underscore; the modifier is that of its elements. Arrow makes
        # no lists of its JSON type, which jsonb takes.
        element = replace(column, kind=column.kind.removeprefix("_"))
        is_plain = column.kind.startswith("_") and not isinstance(data_type.elementType, NESTED)
        return is_plain and element.kind != "jsonb" and _fits(data_type.elementType, element)
    # A modifier of -1 is that of a plain `time`, with all digits; COPY would round to those of another.
    return column.kind in EXACT.get(kind, ()) and _time_fits(
        data_type, TIME_DIGITS if column.modifier < 0 else column.modifier
    )


def _time_fits(data_type: spark.DataType, digits: int) -> bool:
    """Tell whether a time has no more digits than these after the point; no other type is asked."""
    return not isinstance(data_type, spark.TimeType) or bool(data_type.precision <= digits)


def _digits_fit(precision: int, scale: int, column: TableColumn) -> bool:
    limits = column.precision_and_scale
    if limits is None:
        return True
    return scale <= limits[1] and precision - scale <= limits[0] - limits[1]


def _unfit_for_event(fields: Fields, payload: tuple[str, ...], options: WriteOptions) -> list[str]:
    faults = []
    for option, name in options.named_columns().items():
        does_take, takes = _takes(FIELD_OF_OPTION[option])
        if name in fields and not does_take(fields[name][1]):
            faults.append(f"column {name!r} of option {option} takes {takes}, not {fields[name][1].simpleString()}")
    faults += [
        f"column {name!r} is {fields[name][1].simpleString()}, which has no JSON: cast it, or leave it out with the "
        "option payloadColumns"
        for name in payload
        if name in fields and not _is_json(fields[name][1])
    ]
    return faults
