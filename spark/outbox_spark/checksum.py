"""The checksum of a piece, by which a rerun with other rows is told from one with the same."""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


class Checksum:
    """SHA-256 over rows in their order, and over what the options make of them.

    It depends neither on how the rows are cut into batches nor on the bytes that Arrow leaves undefined beneath a NULL:
    each column is hashed as streams of its own, of NULLs, of lengths and of values. The order of rows counts, since it
    is the order in which the events of a key are delivered.
    """

    def __init__(self, made_by: str) -> None:
        self.rows = 0
        self._made_by = made_by
        self._streams: dict[tuple[str, ...], Any] = {}

    def watch(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass batches on, and take their rows in."""
        for batch in batches:
            self.add(batch)
            yield batch

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in the next rows."""
        if batch.num_rows == 0:
            return
        self.rows += batch.num_rows
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            self._add((name,), values)

    def hexdigest(self) -> str:
        """Return the checksum of all rows so far."""
        whole = sha256(self._made_by.encode())
        for path, stream in self._streams.items():
            whole.update("\0".join(path).encode() + stream.digest())
        return whole.hexdigest()

    def _add(self, path: tuple[str, ...], values: pa.Array) -> None:
        self._add_fixed((*path, "null"), values.is_null().cast(pa.uint8()))
        values, kind = values.drop_null(), values.type
        if pa.types.is_struct(kind):
            for place, field in enumerate(kind):
                self._add((*path, f"{place} {field.name}"), pc.struct_field(values, place))
        elif pa.types.is_map(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            if pa.types.is_map(kind):
                values = values.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
            self._add_fixed((*path, "length"), pc.list_value_length(values).cast(pa.int64()))
            self._add((*path, "element"), values.flatten())
        elif pa.types.is_string(kind) or pa.types.is_binary(kind):
            self._add_texts(path, values, pa.int32())
        elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
            self._add_texts(path, values, pa.int64())
        elif pa.types.is_boolean(kind):
            self._add_fixed(path, values.cast(pa.uint8()))
        elif pa.types.is_floating(kind):  # processors differ in the bits of NaN
            self._add_fixed(path, pc.if_else(pc.is_nan(values), pa.scalar(float("nan"), kind), values))
        elif not pa.types.is_null(kind):
            self._add_fixed(path, values)

    def _add_texts(self, path: tuple[str, ...], values: pa.Array, offset_type: pa.DataType) -> None:
        self._add_fixed((*path, "length"), pc.binary_length(values).cast(pa.int64()))
        _, offset_bytes, data = values.buffers()
        offsets = pa.Array.from_buffers(offset_type, len(values) + 1, [None, offset_bytes], offset=values.offset)
        self._update(path, data, offsets[0].as_py(), offsets[-1].as_py())

    def _add_fixed(self, path: tuple[str, ...], values: pa.Array) -> None:
        width = values.type.bit_width // 8
        self._update(path, values.buffers()[1], values.offset * width, (values.offset + len(values)) * width)

    def _update(self, path: tuple[str, ...], buffer: pa.Buffer | None, start: int, end: int) -> None:
        stream = self._streams.setdefault(path, sha256())
        if buffer is not None:
            stream.update(memoryview(buffer)[start:end])
