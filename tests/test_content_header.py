"""Headers are decoded as by the library where it can, and encoded without loss; what is broken is told, not raised."""

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.servers.rabbitmq.content_header import DEEPEST, UNDECODABLE, decode_header
from tests.support.raw_client import entry, long, properties

seconds = st.integers(0, 2**32 - 1).map(lambda at: datetime.fromtimestamp(at, UTC))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(), st.binary().map(bytearray), seconds,
    st.floats(width=32, allow_nan=False), st.builds(Decimal, st.integers(-(2**31), 2**31 - 1)),
)  # fmt: skip
names = st.text(max_size=30)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=10)
short_texts = st.text(max_size=60)
given_properties = st.fixed_dictionaries(
    {},
    optional={
        "message_id": short_texts,
        "message_type": short_texts,
        "content_type": short_texts,
        "user_id": short_texts,
        "timestamp": seconds,
        "priority": st.integers(0, 255),
        "headers": st.dictionaries(names, values),
    },
)


def payload(properties: bytes) -> bytes:
    return struct.pack(">HHQ", 60, 0, 5) + properties


@settings(max_examples=40)
@given(given_properties)
def test_it_reads_what_the_library_writes_and_writes_what_it_reads(said: dict[str, Any]) -> None:
    written = ContentHeader(body_size=5, properties=Basic.Properties(**said)).marshal()
    by_library = ContentHeader()
    by_library.unmarshal(written)

    header = decode_header(written)

    assert header.body_size == 5
    assert dict(header.properties) == dict(by_library.properties)
    assert dict(decode_header(header.marshal()).properties) == dict(header.properties)


@settings(max_examples=40)
@given(st.binary(max_size=100))
def test_it_raises_for_nothing(said: bytes) -> None:
    decode_header(said)
    decode_header(payload(said))
    decode_header(payload(properties(headers=said)))


@pytest.mark.parametrize(
    "value",
    [
        b"S" + long(b"\xff"),
        b"d" + struct.pack(">d", 0.1),
        b"D" + struct.pack(">Bi", 255, -1),
        b"l" + struct.pack(">q", -(2**63)),
        b"x" + long(b"\xff"),
        b"A" + long(b"S" + long(b"\xff") + b"V"),
    ],
)
def test_a_copy_of_a_header_loses_nothing(value: bytes) -> None:
    said = payload(properties(headers=entry(b"n" * 255, value)))

    assert decode_header(said).marshal() == said


def test_what_can_be_decoded_is_kept_beside_what_cannot() -> None:
    table = entry(b"x-aggregate-id", b"S" + long(b"a")) + entry(b"\xff", b"V") + entry(b"last", b"V")
    read = decode_header(payload(properties(message_id=b"id", message_type=b"\xff", headers=table))).properties

    assert (read.message_id, read.message_type) == ("id", r"\xff")
    assert read.headers is not None
    assert read.headers.items() >= {"x-aggregate-id": "a", r"\xff": None, "last": None}.items()
    assert read.headers[UNDECODABLE] == r"b'\xff' is not UTF-8"


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        (entry(b"a", b"V") * 2, "it has two headers 'a'"),
        (entry(b"a", b"?"), "AMQP has no type '?'"),
        (entry(b"a", b"A" + long(b"t")), "it ends too early"),
        (entry(b"a", b"A\0\0\0\1b\0"), "its sizes contradict each other"),
        (entry(b"a", b"S\xff\xff\xff\xff"), "it ends too early"),
    ],
)
def test_what_is_broken_is_told(table: bytes, fault: str) -> None:
    headers = decode_header(payload(properties(headers=table))).properties.headers

    assert headers is not None
    assert headers[UNDECODABLE] == fault


def test_it_stops_at_a_depth_that_nobody_trips_over() -> None:
    value = b"V"
    for _ in range(DEEPEST - 1):
        value = b"A" + long(value)
    deep, deeper = (
        decode_header(payload(properties(headers=entry(b"a", each)))) for each in (value, b"A" + long(value))
    )

    assert UNDECODABLE not in (deep.properties.headers or {})
    assert (deeper.properties.headers or {})[UNDECODABLE] == f"it is nested deeper than {DEEPEST} levels"
