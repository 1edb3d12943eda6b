"""What an executor does to rows: check what only the values can tell, cast, and make the event beside them."""

import json
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from outbox_spark.errors import RowError
from outbox_spark.identity import ids_by_position, ids_by_sequence
from outbox_spark.payload import json_objects
from outbox_spark.plan import AGGREGATE_ID, HEADERS, MESSAGE_ID, PAYLOAD, BusinessColumn, Save

# As what a column goes into a binary COPY: PostgreSQL takes exactly its own type there and casts nothing.
ARROW_TYPES = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "timestamptz": pa.timestamp("us", "UTC"),
    "timestamp": pa.timestamp("us"),
}
KEY_BYTES = 255


def staging_rows(save: Save, batch: pa.RecordBatch, *, partition: int, first: int) -> pa.RecordBatch:
    """Give the rows of the staging table for these rows of the DataFrame.

    Args:
        first: how many rows of this partition came before.
    Raises:
        RowError: the database would refuse a value; the message has the row's key.
    """
    plan = save.plan
    keys = _as_text(batch.column(plan.aggregate_id))
    rows = _Rows(save, batch, keys)
    rows.check()
    names = [column.name for column in plan.columns]
    arrays = [rows.business_value(column) for column in plan.columns]
    names += [MESSAGE_ID, AGGREGATE_ID, PAYLOAD]
    arrays += [rows.message_ids(partition, first), keys, rows.payload()]
    if plan.headers is not None:
        names.append(HEADERS)
        arrays.append(rows.headers(plan.headers))
    return pa.RecordBatch.from_arrays(arrays, names)


class _Rows:
    """Some rows of the DataFrame, with what names them in an error."""

    def __init__(self, save: Save, batch: pa.RecordBatch, keys: pa.Array) -> None:
        self._options = save.options
        self._plan = plan = save.plan
        self._batch = batch
        self._keys = keys
        self._sequences = None if plan.sequence is None else _as_text(batch.column(plan.sequence))

    def check(self) -> None:
        for name, column in zip(self._batch.schema.names, self._batch.columns, strict=True):
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                self._refuse_where(pc.match_substring(column, "\0"), f"column {name!r} holds a NUL character")
        self._refuse_where(pc.greater(pc.binary_length(self._keys), KEY_BYTES), f"its key is over {KEY_BYTES} bytes")
        self._refuse_where(pc.equal(self._keys, ""), "its key is the empty string (NULL asks for no order)")
        for business in self._plan.columns:
            column = self._batch.column(business.index)
            if business.not_null:
                self._refuse_where(column.is_null(), f"column {business.name!r} is NULL")
            if business.max_characters is not None:
                too_long = pc.greater(pc.utf8_length(column), business.max_characters)
                self._refuse_where(too_long, f"column {business.name!r} is longer than {business.type}")
        if self._sequences is not None:
            self._refuse_where(self._sequences.is_null(), "its sequence is NULL")

    def business_value(self, column: BusinessColumn) -> pa.Array:
        values = self._batch.column(column.index)
        if column.kind == "uuid":
            return pa.array([self._uuid(place, value) for place, value in enumerate(values.to_pylist())], pa.binary(16))
        if column.kind == "jsonb":
            return pa.ExtensionArray.from_storage(pa.json_(pa.string()), values.cast(pa.string()))
        if column.kind == "numeric" and pa.types.is_integer(values.type):
            return values.cast(pa.int64()).cast(pa.decimal128(19, 0))
        return values.cast(ARROW_TYPES.get(column.kind, values.type))

    def message_ids(self, partition: int, first: int) -> pa.Array:
        options = self._options
        if self._sequences is None:
            return ids_by_position(
                options.app_id, options.version, partition=partition, first=first, rows=self._batch.num_rows
            )
        return ids_by_sequence(
            options.app_id,
            options.version,
            aggregate_type=options.aggregate_type,
            event_type=options.event_type,
            aggregate_ids=self._keys,
            sequences=self._sequences,
        )

    def payload(self) -> pa.Array:
        if self._plan.payload_is_ready:
            ready = self._batch.column(self._plan.payload[0])
            self._refuse_where(ready.is_null(), "its payload is NULL")
            return ready
        names = self._batch.schema.names
        try:
            return json_objects([(names[index], self._batch.column(index)) for index in self._plan.payload])
        except ValueError as error:
            for index in self._plan.payload:
                column = self._batch.column(index)
                if pa.types.is_floating(column.type):
                    self._refuse_where(pc.invert(pc.is_finite(column)), f"column {names[index]!r}: {error}")
            raise

    def headers(self, index: int) -> pa.Array:
        column = self._batch.column(index)
        if pa.types.is_map(column.type):
            values = [None if value is None else json.dumps(dict(value)) for value in column.to_pylist()]
            column = pa.array(values, pa.string())
        # jsonb, which headers are, takes no NUL at all; json lets the escaped one pass.
        self._refuse_where(pc.match_substring(column, "\\u0000"), "its headers hold a NUL character")
        is_object = pc.match_substring_regex(column, r"^\s*\{")
        self._refuse_where(pc.invert(is_object), "its headers are no JSON object")
        return pa.ExtensionArray.from_storage(pa.json_(pa.string()), column.cast(pa.string()))

    def _uuid(self, place: int, value: str | None) -> bytes | None:
        try:
            return None if value is None else UUID(value).bytes
        except ValueError:
            raise RowError(f"{self._name(place)}: {value!r} is no UUID") from None

    def _refuse_where(self, faulty: pa.Array, fault: str) -> None:
        place = pc.index(faulty, True).as_py()
        if place >= 0:
            raise RowError(f"{self._name(place)}: {fault}")

    def _name(self, place: int) -> str:
        names = self._batch.schema.names
        parts = [f"{names[self._plan.aggregate_id]} {self._keys[place].as_py()!r}"]
        if self._plan.sequence is not None and self._sequences is not None:
            parts.append(f"{names[self._plan.sequence]} {self._sequences[place].as_py()!r}")
        return f"the row with {' and '.join(parts)} cannot be written to {'.'.join(self._plan.table)} and the outbox"


def _as_text(column: pa.Array) -> pa.Array:
    return column.cast(pa.string())
