"""What an executor does to rows: check what only the values can tell, cast, and make the event with them.

The id of a message is the same whenever the same event is written. It is made in one of three ways:

- With a sequence column it is UUID version 5 over (app, version, aggregate type, aggregate id, event type, sequence).
  It follows from the row alone, whatever task, attempt, order or number of partitions brings the row, and anyone can
  compute it again. Two events of a batch with the same sequence would be one to every consumer: the batch is refused.
- With a message key the id is the same but for app and version, which are left out. The same event has the same id in
  whatever batch it comes, and consumers absorb a rerun under another name. Within a batch it is refused as above, also
  when two DataFrames bring it.
- Without either it is UUID version 8 over (app, version, DataFrame, partition, position). It is unique by construction,
  and the same in every attempt as long as Spark brings the same rows in the same order. Writing once needs no more: of
  a task's attempts one alone is committed, and the ledger recognises a batch that is run again.

JSON is made a column at a time: an object costs the executors a fifth of what json.dumps would.
"""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha1, sha256
from uuid import NAMESPACE_URL, UUID, uuid5

import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_postgresql import dbapi

from outbox_spark.errors import RowError
from outbox_spark.plan import DELETE_FLAG, BusinessColumn, EventPlan, Save, of_outbox

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
# Spark's dates are of the years 1 to 9999, but nothing keeps others out. ADBC writes one of them as -infinity, and in
# Arrow's text most are no date.
FIRST_DAY, BEYOND_LAST_DAY = -719_162, 2_932_897  # since 1970
MICROSECONDS_OF_DAY = 86_400_000_000
# Classes of SQLSTATE that tell of a value: by its type, a constraint, a view's condition, a limit or a trigger. The
# last is that of a text which is no tsvector.
OF_VALUES = ("22", "23", "44", "54", "P0", "42601")

NEEDS_ESCAPE = r'["\\\x00-\x1f]'
NAMESPACE = uuid5(NAMESPACE_URL, "outbox-spark")

# The high half of byte 6 becomes the version, the two high bits of byte 8 the variant (RFC 9562).
AS_VERSION_5 = bytes(0x50 | (byte & 0x0F) for byte in range(256))
AS_VERSION_8 = bytes(0x80 | (byte & 0x0F) for byte in range(256))
AS_VARIANT = bytes(0x80 | (byte & 0x3F) for byte in range(256))


def staging_rows(save: Save, batch: pa.RecordBatch, *, partition: int, first: int) -> pa.RecordBatch:
    """Return the rows of the staging table for these rows of the DataFrame.

    Args:
        first: how many rows of this partition came before.
    Raises:
        RowError: the database would refuse a value; the message has the row's key.
    """
    rows = _Rows(save, batch, partition, first)
    rows.check()
    made = {column.name: rows.business_value(column) for column in save.plan.columns}
    if rows.deleted is not None:
        made[DELETE_FLAG] = rows.deleted
    if save.plan.event is not None:
        made |= {of_outbox(name): array for name, array in rows.event(save.plan.event).items()}
    return pa.RecordBatch.from_pydict(made)


def final_rows(
    save: Save, event: EventPlan, batch: pa.RecordBatch, *, partition: int, first: int
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the rows of the business table and those of the outbox; as `staging_rows`, without a staging table."""
    rows = staging_rows(save, batch, partition=partition, first=first)
    events = {name: rows.column(of_outbox(name)) for name in event.columns}
    same = {**event.same, "writer": save.options.app_id, "batch_id": save.options.version}
    events |= {name: pa.repeat(value, rows.num_rows) for name, value in same.items()}
    return rows.select([column.name for column in save.plan.columns]), pa.RecordBatch.from_pydict(events)


@contextmanager
def naming_refused(save: Save, batch: pa.RecordBatch, table: str, *, partition: int, first: int) -> Iterator[None]:
    """Name the row of the DataFrame when PostgreSQL refuses one in the COPY into this table.

    Raises:
        RowError: in place of ADBC's error, if that tells of a value and of its line.
    """
    try:
        yield
    except dbapi.Error as error:
        told = {name.decode(): text.decode(errors="replace") for name, text in error.details}
        # The last match: a function that refused the value comes before. The words are of the server's language.
        in_table = rf"{re.escape(table)}\D*(\d+)(?:, \w+ (.+))?$"
        lines = re.findall(in_table, told.get("PG_DIAG_CONTEXT", ""), re.MULTILINE)
        if not lines or not told["PG_DIAG_SQLSTATE"].startswith(OF_VALUES):
            raise
        line, column = lines[-1]
        where = f"column {column.removeprefix(of_outbox(''))!r}: " if column else ""
        detail = f" ({told['PG_DIAG_MESSAGE_DETAIL']})" if "PG_DIAG_MESSAGE_DETAIL" in told else ""
        place, name = int(line) - 1, _Rows(save, batch, partition, first).name(int(line) - 1)
        fault = f"{where}{told['PG_DIAG_MESSAGE_PRIMARY']}{detail}".replace("\n", " ")
        raise RowError(f"{name}: {fault}", place=place, fault=fault) from None


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
        self._named = {place: as_text(batch.column(place)) for place in places if place is not None}
        upsert = save.plan.upsert
        self._keys = () if upsert is None else upsert.keys
        self.deleted = None if upsert is None or upsert.delete is None else batch.column(upsert.delete)

    def check(self) -> None:
        for name, column in zip(self._batch.schema.names, self._batch.columns, strict=True):
            for is_faulty, fault in UNREADABLE:
                self._refuse_any(column, is_faulty, f"column {name!r} {fault}")
            self._refuse_any(column, _has_nul, f"column {name!r} holds a NUL character")
        if self.deleted is not None:
            self._refuse_where(self.deleted.is_null(), "it does not say whether it is deleted")
        for business in self._plan.columns:
            column = self._batch.column(business.index)
            if business.not_null:
                is_missing = column.is_null()
                if self.deleted is not None and business.name not in self._keys:
                    is_missing = pc.and_not(is_missing, self.deleted)  # of a deleted row the keys are enough
                self._refuse_where(is_missing, f"column {business.name!r} is NULL")
            if business.max_characters is not None:
                is_too_long = partial(_is_longer, business.max_characters)
                self._refuse_any(column, is_too_long, f"column {business.name!r} is longer than {business.type}")
            if business.max_digits is not None:
                fault = f"column {business.name!r} has digits that {business.type} rounds: cut them with date_trunc"
                self._refuse_any(column, partial(_is_finer, business.max_digits), fault)

    def business_value(self, column: BusinessColumn) -> pa.Array:
        return self._made(partial(_as_kind, column.kind), column.index)

    def event(self, event: EventPlan) -> dict[str, pa.Array]:
        """Return the columns of outbox.message that these rows have for themselves."""
        texts = {name: self._text(name, place) for name, place in event.texts.items()}
        if event.deletes is not None:
            kinds = event.deletes.event_type, event.deletes.other_event_type
            texts["event_type"] = pc.if_else(self._batch.column(event.deletes.place), *map(pa.scalar, kinds))
        made = {"message_id": self._message_ids(event, texts), **texts, event.payload_column: self._payload(event)}
        if event.headers is not None:
            made["headers"] = self._headers(event.headers)
        if event.available_at is not None:
            made["available_at"] = self._made(partial(_as_kind, "timestamptz"), event.available_at)
        return made

    def _text(self, name: str, place: int) -> pa.Array:
        values = as_text(self._batch.column(place))
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
            return pc.coalesce(self._made(_uuids, event.message_id), by_place)
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
        if not event.payload_is_whole:
            payload = self._object(event.payload)
            if event.deletes is None:
                return payload
            return pc.if_else(self._batch.column(event.deletes.place), self._object(event.deletes.payload), payload)
        (place,) = event.payload
        whole = self._batch.column(place)
        self._refuse_where(whole.is_null(), "its payload is NULL")
        return self._made(json_values, place) if pa.types.is_nested(whole.type) else whole

    def _object(self, places: Sequence[int]) -> pa.Array:
        names = self._batch.schema.names
        return json_objects([(names[place], self._made(json_values, place)) for place in places])

    def _made(self, make: Callable[[pa.Array], pa.Array], place: int) -> pa.Array:
        """Make something of each value of a column, and name the first row of which nothing can be made."""
        column = self._batch.column(place)
        try:
            return make(column)
        except ValueError as error:
            faulty = first_faulty(column, partial(fails, make))
            raise self._refused(faulty, f"column {self._batch.schema.names[place]!r}: {error}") from None

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

    def _refuse_where(self, faulty: pa.Array, fault: str) -> None:
        place = pc.index(faulty, True).as_py()
        if place >= 0:
            raise self._refused(place, fault)

    def _refuse_any(self, column: pa.Array, is_faulty: Callable[[pa.Array], bool], fault: str) -> None:
        """Refuse the first row whose value in this column is faulty, or has one inside that is."""
        if is_faulty(column):
            raise self._refused(first_faulty(column, is_faulty), fault)

    def _refused(self, place: int, fault: str) -> RowError:
        return RowError(f"{self.name(place)}: {fault}", place=place, fault=fault)

    def name(self, place: int) -> str:
        names = self._batch.schema.names
        parts = [f"{names[column]} {_shown(texts[place])}" for column, texts in self._named.items()]
        which = " and ".join(parts) or f"number {self._first + place + 1} of partition {self._partition}"
        return f"the row {'with ' if parts else ''}{which} cannot be written to {self._plan}"


def _shown(text: pa.Scalar) -> str:
    value = text.cast(pa.binary()).as_py()  # it may be what is faulty: not UTF-8
    return repr(value if value is None else value.decode(errors="replace"))


def first_faulty(column: pa.Array, is_faulty: Callable[[pa.Array], bool]) -> int:
    """Find the first row that is faulty; there is one."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        # Taken, not sliced: a slice of lists still has the values of all.
        if is_faulty(column.take(pa.array(range(low, middle)))):
            high = middle
        else:
            low = middle
    return low


def fails(make: Callable[[pa.Array], pa.Array], column: pa.Array) -> bool:
    """Whether nothing can be made of some value."""
    try:
        make(column)
    except ValueError:
        return True
    return False


def _as_kind(kind: str, values: pa.Array) -> pa.Array:
    """Cast to what a binary COPY takes for a type of PostgreSQL."""
    if kind.startswith("_"):
        elements = _as_kind(kind.removeprefix("_"), values.values)
        return pc.if_else(values.is_valid(), pa.ListArray.from_arrays(values.offsets, elements), None)
    if kind == "uuid":
        return _uuids(values)
    if pa.types.is_nested(values.type) and kind in {"json", "jsonb"}:
        values = pc.if_else(values.is_valid(), json_values(values), None)
    if kind == "jsonb":
        return pa.ExtensionArray.from_storage(pa.json_(pa.string()), values.cast(pa.string()))
    if kind == "numeric" and pa.types.is_integer(values.type):
        return values.cast(pa.int64()).cast(pa.decimal128(19, 0))
    return values.cast(ARROW_TYPES.get(kind, values.type))


def _uuids(values: pa.Array) -> pa.Array:
    return pa.array([None if value is None else _uuid(value) for value in values.to_pylist()], pa.binary(16))


def _uuid(value: str) -> bytes:
    try:
        return UUID(value).bytes
    except ValueError:
        raise ValueError(f"{value!r} is no UUID") from None


def is_invalid(column: pa.Array) -> bool:
    """Whether it holds text that is not UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return True
    return False


def _has_nul(column: pa.Array) -> bool:
    return any(_any(pc.match_substring(leaf, "\0")) for leaf in _leaves(column) if _is_text(leaf.type))


def _is_longer(most: int, column: pa.Array) -> bool:
    return any(_any(pc.greater(pc.utf8_length(leaf), most)) for leaf in _leaves(column))


def _is_finer(digits: int, column: pa.Array) -> bool:
    """Whether a timestamp has more digits after the point of its seconds."""
    step = 10 ** (6 - digits)
    times = (leaf.cast(pa.int64()) for leaf in _leaves(column))
    return any(_any(pc.not_equal(pc.multiply(pc.divide(each, step), step), each)) for each in times)


def is_of_no_year(column: pa.Array) -> bool:
    """Whether it holds a date or a timestamp that neither Python nor the database has."""
    for leaf in _leaves(column):
        if pa.types.is_date(leaf.type):
            days, unit = leaf.cast(pa.int32()), 1
        elif pa.types.is_timestamp(leaf.type):
            days, unit = leaf.cast(pa.int64()), MICROSECONDS_OF_DAY
        else:
            continue
        if _any(pc.less(days, FIRST_DAY * unit)) or _any(pc.greater_equal(days, BEYOND_LAST_DAY * unit)):
            return True
    return False


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """Return the plain values of a column, those inside of lists, maps and structs as well."""
    if pa.types.is_struct(column.type):
        for field in column.flatten():
            yield from _leaves(field)
    elif pa.types.is_nested(column.type):
        yield from _leaves(column.values)
    else:
        yield column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _any(found: pa.Array) -> bool:
    return bool(pc.any(found, min_count=0).as_py())


# What no value of Python can be made of.
UNREADABLE: tuple[tuple[Callable[[pa.Array], bool], str], ...] = (
    (is_invalid, "holds text that is not UTF-8"),
    (is_of_no_year, "holds a time outside of the years 1 to 9999"),
)


def json_objects(members: Sequence[tuple[str, pa.Array]]) -> pa.Array:
    """Make one object a row of the JSON texts of its members, its keys in their order; a null is kept as null."""
    parts: list[pa.Array | str] = []
    for index, (name, texts) in enumerate(members):
        parts += [f"{',' if index else '{'}{json.dumps(name, ensure_ascii=False)}:", texts]
    return pc.binary_join_element_wise(*parts, "}", "")


def json_values(column: pa.Array) -> pa.Array:
    """Make the JSON text of each value; of a null, `null`.

    Numbers keep their exact text, decimals too. A date is "2026-11-21", an instant "2026-11-21T10:00:00.000000Z", a
    timestamp without zone the same without the Z. A time is "10:00:00.000000", bytes are base64; structs and maps are
    objects. NaN and infinity have no JSON: ValueError.
    """
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = _quoted(column)
    elif pa.types.is_struct(kind):
        fields = [(kind.field(place).name, json_values(field)) for place, field in enumerate(column.flatten())]
        text = pc.if_else(column.is_valid(), json_objects(fields) if fields else "{}", None)
    elif pa.types.is_map(kind):
        # A key is text in JSON, whatever it was.
        keys = _quoted(as_text(column.keys))
        text = _joined(column, pc.binary_join_element_wise(keys, json_values(column.items), ":"), "{", "}")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        text = _joined(column, json_values(column.values), "[", "]")
    elif pa.types.is_floating(kind):
        if not pc.all(pc.is_finite(column), min_count=0).as_py():  # nulls are passed over
            raise ValueError("NaN and infinity have no JSON")
        text = column.cast(pa.string())
    elif pa.types.is_date(kind):
        text = _between_quotes(column.cast(pa.string()))
    elif pa.types.is_time(kind):
        # Spark hands over nanoseconds, whatever the type's precision; `tables.py` takes nothing finer than
        # microseconds.
        text = _between_quotes(column.cast(pa.time64("us")).cast(pa.string()))
    elif pa.types.is_timestamp(kind):
        zone = "" if kind.tz is None else "Z"
        # Without its zone an instant is its UTC time; strftime on a zone would need the system's zone files.
        text = _between_quotes(pc.strftime(column.cast(pa.timestamp("us")), format=f"%Y-%m-%dT%H:%M:%S{zone}"))
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        encoded = [None if value is None else b64encode(value).decode() for value in column.to_pylist()]
        text = _between_quotes(pa.array(encoded, pa.string()))
    else:  # whole numbers, decimals, booleans: Arrow's text is JSON
        text = column.cast(pa.string())
    return text.fill_null("null")


def as_text(column: pa.Array) -> pa.Array:
    """Return text, whole numbers, dates and decimals as text; a decimal with all its digits, as PostgreSQL does."""
    texts = column.cast(pa.string())
    if pa.types.is_decimal(column.type) and pc.any(pc.match_substring(texts, "E")).as_py():  # 1.2E-7
        return pa.array([None if value is None else f"{value:f}" for value in column.to_pylist()], pa.string())
    return texts


def _joined(column: pa.Array, members: pa.Array, opening: str, closing: str) -> pa.Array:
    """Put the members of each list or map between its brackets."""
    kind = pa.LargeListArray if pa.types.is_large_list(column.type) else pa.ListArray
    joined = pc.binary_join(kind.from_arrays(column.offsets, members.cast(pa.string())), ",")
    whole = pc.binary_join_element_wise(opening, joined, closing, "")
    return pc.if_else(column.is_valid(), whole, None)


def _quoted(column: pa.Array) -> pa.Array:
    unsafe = pc.match_substring_regex(column, NEEDS_ESCAPE).fill_null(False)
    if not pc.any(unsafe).as_py():
        return _between_quotes(column)
    return pa.array(
        [None if value is None else json.dumps(value, ensure_ascii=False) for value in column.to_pylist()], column.type
    )


def _between_quotes(column: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', column, '"', "")


def message_id(
    app_id: str, version: int, *, aggregate_type: str, aggregate_id: str | None, event_type: str, sequence: str
) -> UUID:
    """Compute one id as the executors do for a DataFrame with a sequence column.

    With app_id "" and version 0 it is that of an event with a `message_key`, which tells of no batch.
    """
    name = "\0".join((aggregate_type, event_type, aggregate_id or "", sequence))
    return uuid5(NAMESPACE, _prefix(app_id, version) + name)


def ids_by_sequence(
    app_id: str,
    version: int,
    *,
    aggregate_types: pa.Array | str,
    event_types: pa.Array | str,
    aggregate_ids: pa.Array,
    sequences: pa.Array,
) -> pa.Array:
    """Return each row the id that follows from its sequence. None of the strings holds a NUL character."""
    names = pc.binary_join_element_wise(aggregate_types, event_types, aggregate_ids.fill_null(""), sequences, "\0")
    hashing = sha1(NAMESPACE.bytes, usedforsecurity=False)
    hashing.update(_prefix(app_id, version).encode())
    ids = bytearray()
    for name in names.cast(pa.binary()).to_pylist():
        one = hashing.copy()
        one.update(name)
        ids += one.digest()[:16]
    return _as_ids(ids, AS_VERSION_5)


def ids_by_position(app_id: str, version: int, frame: int, *, partition: int, first: int, rows: int) -> pa.Array:
    """Return each row the id that follows from its place: 8 bytes of the batch, 3 of the partition, 5 of the row.

    Args:
        frame: the number of the DataFrame among those of the batch that have events, from 0.
    """
    batch = sha256(f"{app_id}\0{version}\0{frame}".encode()).digest()[:8]
    ids = bytearray((batch + partition.to_bytes(3) + bytes(5)) * rows)
    positions = pa.array(range(first, first + rows), pa.uint64()).buffers()[1].to_pybytes()
    for place in range(5):
        ids[15 - place :: 16] = positions[place::8]
    return _as_ids(ids, AS_VERSION_8)


def _prefix(app_id: str, version: int) -> str:
    return f"{app_id}\0{version}\0"


def _as_ids(ids: bytearray, as_version: bytes) -> pa.Array:
    ids[6::16] = ids[6::16].translate(as_version)
    ids[8::16] = ids[8::16].translate(AS_VARIANT)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(ids) // 16, [None, pa.py_buffer(bytes(ids))])
