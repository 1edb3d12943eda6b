"""The ids of messages: made by the executors, and the same whenever the same event is written.

With a sequence column the id is UUID version 5 over (app, version, aggregate type, aggregate id, event type,
sequence): it follows from the row alone, so it is stable whatever task, attempt, order or number of partitions
brings the row, and anyone can compute it again. Two events of a batch with the same sequence would be one to every
consumer, so the batch is refused.

With a message key the id is the same but for app and version, which are left out: the same event has the same id in
whatever batch it comes, and consumers absorb a rerun under another name. Within a batch it is refused as above,
also when two DataFrames bring it.

Without either it is UUID version 8 over (app, version, DataFrame, partition, position): unique by construction, and
the same in every attempt only as long as Spark brings the same rows in the same order. It need be no more for writing
once: of a task's attempts one alone is committed, and a batch that is run again is recognised by the ledger.
"""

from hashlib import sha1, sha256
from uuid import NAMESPACE_URL, UUID, uuid5

import pyarrow as pa
import pyarrow.compute as pc

NAMESPACE = uuid5(NAMESPACE_URL, "outbox-spark")
# The high half of byte 6 becomes the version, the two high bits of byte 8 the variant (RFC 9562).
AS_VERSION_5 = bytes(0x50 | (byte & 0x0F) for byte in range(256))
AS_VERSION_8 = bytes(0x80 | (byte & 0x0F) for byte in range(256))
AS_VARIANT = bytes(0x80 | (byte & 0x3F) for byte in range(256))


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
    """Give each row the id that follows from its sequence. None of the strings holds a NUL character."""
    names = pc.binary_join_element_wise(aggregate_types, event_types, aggregate_ids.fill_null(""), sequences, "\0")
    hashing = sha1(NAMESPACE.bytes, usedforsecurity=False)
    hashing.update(_prefix(app_id, version).encode())
    ids = bytearray()
    for name in names.cast(pa.binary()).to_pylist():
        one = hashing.copy()
        one.update(name)
        ids += one.digest()[:16]
    return _uuids(ids, AS_VERSION_5)


def ids_by_position(app_id: str, version: int, frame: int, *, partition: int, first: int, rows: int) -> pa.Array:
    """Give each row the id that follows from its place: 8 bytes of the batch, 3 of the partition, 5 of the row.

    Args:
        frame: the number of the DataFrame among those of the batch that have events, from 0.
    """
    batch = sha256(f"{app_id}\0{version}\0{frame}".encode()).digest()[:8]
    ids = bytearray((batch + partition.to_bytes(3) + bytes(5)) * rows)
    positions = pa.array(range(first, first + rows), pa.uint64()).buffers()[1].to_pybytes()
    for place in range(5):
        ids[15 - place :: 16] = positions[place::8]
    return _uuids(ids, AS_VERSION_8)


def _prefix(app_id: str, version: int) -> str:
    return f"{app_id}\0{version}\0"


def _uuids(ids: bytearray, as_version: bytes) -> pa.Array:
    ids[6::16] = ids[6::16].translate(as_version)
    ids[8::16] = ids[8::16].translate(AS_VARIANT)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(ids) // 16, [None, pa.py_buffer(bytes(ids))])
