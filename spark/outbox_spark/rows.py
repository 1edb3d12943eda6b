"""What an executor does to rows: check what only the values can tell, cast, and make the event beside them."""

import json
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from outbox_spark.errors import RowError
from outbox_spark.identity import ids_by_position, ids_by_sequence
from outbox_spark.payload import json_objects, json_values
from outbox_spark.plan import BusinessColumn, EventPlan, Save, of_outbox

# As what a column goes into a binary COPY: PostgreSQL takes exactly its own type there and casts nothing.
ARROW_TYPES = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "timestamptz": pa.timestamp("us", "UTC"),
    "timestamp": pa.timestamp("us"),
    "time": pa.time64("us"),
}
TEXT_BYTES = 255


def staging_rows(save: Save, batch: pa.RecordBatch, *, partition: int, first: int) -> pa.RecordBatch:
    """Give the rows of the staging table for these rows of the DataFrame.

    Args:
        first: how many rows of this partition came before.
    Raises:
        RowError: the database would refuse a value; the message has the row's key.
    """
    rows = _Rows(save, batch, partition, first)
    rows.check()
    made = {column.name: rows.business_value(column) for column in save.plan.columns}
    if save.plan.event is not None:
        made |= {of_outbox(name): array for name, array in rows.event(save.plan.event).items()}
    return pa.RecordBatch.from_pydict(made)


def final_rows(
    save: Save, event: EventPlan, batch: pa.RecordBatch, *, partition: int, first: int
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Give the rows of the business table and those of the outbox; as `staging_rows`, without a staging table."""
    rows = staging_rows(save, batch, partition=partition, first=first)
    events = {name: rows.column(of_outbox(name)) for name in event.columns}
    same = {**event.same, "writer": save.options.app_id, "batch_id": save.options.version}
    events |= {name: pa.repeat(value, rows.num_rows) for name, value in same.items()}
    return rows.select([column.name for column in save.plan.columns]), pa.RecordBatch.from_pydict(events)


class _Rows:
    """Some rows of the DataFrame, with what names them in an error."""

    def __init__(self, save: Save, batch: pa.RecordBatch, partition: int, first: int) -> None:
        self._options = save.options
        self._plan = save.plan
        self._batch = batch
        self._partition = partition
        self._first = first
        event = save.plan.event
        places = [] if event is None else [event.texts.get("aggregate_id"), event.sequence]
        self._named = {place: _as_text(batch.column(place)) for place in places if place is not None}

    def check(self) -> None:
        for name, column in zip(self._batch.schema.names, self._batch.columns, strict=True):
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                self._refuse_where(pc.match_substring(column, "\0"), f"column {name!r} holds a NUL character")
        for business in self._plan.columns:
            column = self._batch.column(business.index)
            if business.not_null:
                self._refuse_where(column.is_null(), f"column {business.name!r} is NULL")
            if business.max_characters is not None:
                too_long = pc.greater(pc.utf8_length(column), business.max_characters)
                self._refuse_where(too_long, f"column {business.name!r} is longer than {business.type}")

    def business_value(self, column: BusinessColumn) -> pa.Array:
        return self._as_kind(column.kind, column.name, self._batch.column(column.index))

    def _as_kind(self, kind: str, name: str, values: pa.Array) -> pa.Array:
        """Cast to what a binary COPY takes for a type of PostgreSQL."""
        if kind.startswith("_"):
            elements = self._as_kind(kind.removeprefix("_"), name, values.values)
            return pc.if_else(values.is_valid(), pa.ListArray.from_arrays(values.offsets, elements), None)
        if kind == "uuid":
            return self._uuids(values)
        if pa.types.is_nested(values.type) and kind in {"json", "jsonb"}:
            values = pc.if_else(values.is_valid(), self._json(name, values), None)
        if kind == "jsonb":
            return pa.ExtensionArray.from_storage(pa.json_(pa.string()), values.cast(pa.string()))
        if kind == "numeric" and pa.types.is_integer(values.type):
            return values.cast(pa.int64()).cast(pa.decimal128(19, 0))
        return values.cast(ARROW_TYPES.get(kind, values.type))

    def event(self, event: EventPlan) -> dict[str, pa.Array]:
        """Give the columns of outbox.message that these rows have of their own."""
        texts = {name: self._text(name, place) for name, place in event.texts.items()}
        made = {"message_id": self._message_ids(event, texts), **texts, "payload": self._payload(event)}
        if event.headers is not None:
            made["headers"] = self._headers(event.headers)
        return made

    def _text(self, name: str, place: int) -> pa.Array:
        values = _as_text(self._batch.column(place))
        shown = "key" if name == "aggregate_id" else name
        self._refuse_where(pc.greater(pc.binary_length(values), TEXT_BYTES), f"its {shown} is over {TEXT_BYTES} bytes")
        if name == "aggregate_id":
            self._refuse_where(pc.equal(values, ""), "its key is the empty string (NULL asks for no order)")
        if name in {"aggregate_type", "event_type"}:
            self._refuse_where(pc.equal(values.fill_null(""), ""), f"its {shown} is missing")
        return values

    def _message_ids(self, event: EventPlan, texts: dict[str, pa.Array]) -> pa.Array:
        app_id, version = (self._options.app_id, self._options.version) if event.id_tells_batch else ("", 0)
        rows = self._batch.num_rows
        if event.sequence is None:
            place = {"partition": self._partition, "first": self._first}
            by_place = ids_by_position(app_id, version, event.number, **place, rows=rows)
            if event.message_id is None:
                return by_place
            return pc.coalesce(self._uuids(self._batch.column(event.message_id)), by_place)
        sequences = self._named[event.sequence]
        self._refuse_where(sequences.is_null(), "its sequence is NULL")
        return ids_by_sequence(
            app_id,
            version,
            aggregate_types=texts.get("aggregate_type", event.same.get("aggregate_type")),
            event_types=texts.get("event_type", event.same.get("event_type")),
            aggregate_ids=texts.get("aggregate_id", pa.nulls(rows, pa.string())),
            sequences=sequences,
        )

    def _payload(self, event: EventPlan) -> pa.Array:
        columns = [(self._batch.schema.names[place], self._batch.column(place)) for place in event.payload]
        if not event.payload_is_whole:
            return json_objects([(name, self._json(name, column)) for name, column in columns])
        ((name, whole),) = columns
        self._refuse_where(whole.is_null(), "its payload is NULL")
        return self._json(name, whole) if pa.types.is_nested(whole.type) else whole

    def _json(self, name: str, values: pa.Array) -> pa.Array:
        try:
            return json_values(values)
        except ValueError as error:
            raise RowError(f"{self._name(_first_faulty(values))}: column {name!r}: {error}") from None

    def _headers(self, index: int) -> pa.Array:
        column = self._batch.column(index)
        if pa.types.is_map(column.type):
            values = [None if value is None else json.dumps(dict(value)) for value in column.to_pylist()]
            column = pa.array(values, pa.string())
        # jsonb, which headers are, takes no NUL at all; json lets the escaped one pass.
        self._refuse_where(pc.match_substring(column, "\\u0000"), "its headers hold a NUL character")
        is_object = pc.match_substring_regex(column, r"^\s*\{")
        self._refuse_where(pc.invert(is_object), "its headers are no JSON object")
        return pa.ExtensionArray.from_storage(pa.json_(pa.string()), column.cast(pa.string()))

    def _uuids(self, values: pa.Array) -> pa.Array:
        return pa.array([self._uuid(place, value) for place, value in enumerate(values.to_pylist())], pa.binary(16))

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
        parts = [f"{names[column]} {texts[place].as_py()!r}" for column, texts in self._named.items()]
        which = " and ".join(parts) or f"number {self._first + place + 1} of partition {self._partition}"
        return f"the row {'with ' if parts else ''}{which} cannot be written to {self._plan}"


def _first_faulty(values: pa.Array) -> int:
    """Find the row that has no JSON."""
    for place in range(len(values)):
        try:
            json_values(values[place : place + 1])
        except ValueError:
            return place
    raise AssertionError("every row has its JSON")


def _as_text(column: pa.Array) -> pa.Array:
    return column.cast(pa.string())
