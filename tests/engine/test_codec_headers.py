"""What the compiled codec writes of a row's headers without Python is what the pure one writes by the library."""

import json
from random import Random
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp.header import ContentHeader

from relay.engine.row import Row, give_rows
from relay.engine.send import codec, frames
from relay.engine.send.codec import Codec
from relay.servers.rabbitmq.content_header import decode_header
from tests.engine.encoders import IDENTITY, decode, encoder
from tests.engine.plain_wire import properties
from tests.engine.rows import ROW

pytestmark = pytest.mark.skipif(codec.CODEC is Codec.PURE, reason="the codec was not built: no compiler")

INTEGERS = [
    sign * 2**bits + more for bits in (0, 7, 8, 15, 16, 31, 32, 59, 63, 64) for sign in (1, -1) for more in (-1, 0, 1)
]
NAMES = [
    "a",
    "tenant",
    "x-outbox-id",
    "x-outbox-writer",
    "x-folded-header",
    "x-cc",
    "CC",
    "traceparent",
    "tracestate",
    "x" * 128,
    "x" * 129,
    "",
    "é",
    '"',
    "\\",
]
TEXTS = ["", "acme", "é", '"', "\\", "\x01", "\x7f", "😀", "x" * 300]
ODD = [
    "", "{", "{}", "{} ", '{"a"', '{"a":', '{"a": ', '{"a": 1', '{"a": 1,', '{"a": 1, }', '{"a": "x', '{"a": tru',
    '{"a": 1, "a": 2}', '{"a":1,"b":"x"}', '{"a": -0}', '{"a": 01}', '{"a": 1.0}', '{"a": 1e2}', '{"a": -}',
    '{"a": +1}', '{"a": 1}}', '{"a": "\x01"}', '{"a" : 1}', '{"a":  1}', '{"a": truefalse}', '{"a": nul}',
    '{"a": 1}\0', '{"a\0": 1}', '{"a": "\udcff"}',
]  # fmt: skip
TRACE, PARENT = b"0af7651916cd43dd8448eb211c80319c", b"b7ad6b7169203331"
TRACEPARENTS = [
    b"00-" + TRACE + b"-" + PARENT + b"-01",
    b"fe-" + b"0" * 31 + b"1-1" + b"0" * 15 + b"-ff",
    b"ff-" + TRACE + b"-" + PARENT + b"-01",
    b"f0-" + b"0" * 32 + b"-" + PARENT + b"-01",
    b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
    b"00-" + TRACE.upper() + b"-" + PARENT + b"-01",
    b"00-" + TRACE + b"-" + PARENT + b"-01\n",
    b"00_" + TRACE + b"-" + PARENT + b"-01",
    b"00-" + TRACE + b"-" + PARENT + b"-0:",
    b"none",
    b"",
]  # fmt: skip

values = st.recursive(
    st.sampled_from([None, True, False, 0.5, *INTEGERS, *TEXTS]),
    lambda some: st.lists(some, max_size=2) | st.dictionaries(st.sampled_from(NAMES), some, max_size=2),
    max_leaves=3,
)
objects = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), values, max_size=18)
texts = st.builds(
    lambda headers, plain: json.dumps(headers, ensure_ascii=plain).encode(errors="replace"), objects, st.booleans()
)
broken = st.builds(
    lambda text, at, put: text[:at] + put + text[at:],
    texts,
    st.integers(1, 60),
    st.sampled_from([b" ", b",", b"0", b"-", b"}", b'"', b"\0", b"\xff", b"\\"]),
)


def assert_alike(rows: list[Row], *, redelivered: bool = False) -> None:
    pure, compiled = (
        encoder(make, frame_max=0).encode(rows, {row.id for row in rows} if redelivered else ())
        for make in (frames.Encoder, codec.Encoder)
    )
    assert (compiled.frames, compiled.rows, set(compiled.refused)) == (pure.frames, pure.rows, set(pure.refused))


@pytest.mark.parametrize("text", ODD)
def test_odd_headers_are_written_or_refused_alike(text: str) -> None:
    assert_alike([ROW._replace(headers=text.encode(errors="surrogateescape"))])


@pytest.mark.parametrize("value", [True, False, None, 0.5, *INTEGERS, *TEXTS])
def test_a_value_is_written_or_refused_alike(value: object) -> None:
    for ensure_ascii in (True, False):
        text = json.dumps({"a": value, "b": "c"}, ensure_ascii=ensure_ascii)
        assert_alike([ROW._replace(headers=text.encode())])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_written_or_refused_alike(name: str) -> None:
    assert_alike([ROW._replace(headers=json.dumps({"first": 1, name: ["k"], "last": 2}, ensure_ascii=False).encode())])
    assert_alike([ROW._replace(headers=json.dumps({"first": 1, name: "k"}, ensure_ascii=False).encode())])


@pytest.mark.parametrize("traceparent", TRACEPARENTS)
@pytest.mark.parametrize("tracestate", [None, b"a=1"])
def test_a_trace_is_written_alike(traceparent: bytes, tracestate: bytes | None) -> None:
    for headers in (None, b'{"a": 1}'):
        row = ROW._replace(traceparent=traceparent, tracestate=tracestate, headers=headers)
        assert_alike([row])
        assert_alike([row], redelivered=True)


@pytest.mark.parametrize("count", [16, 17, 400])
def test_many_headers_are_written_alike(count: int) -> None:
    text = json.dumps({f"header-{n}": n for n in range(count)}).encode()

    assert_alike([ROW._replace(headers=text), ROW, ROW._replace(headers=text)])


@given(st.lists(texts | broken, max_size=5))
def test_headers_are_written_alike(several: list[bytes]) -> None:
    assert_alike([ROW._replace(headers=text) for text in several])


# As the tail's READ returns them.
ROWS = """
    SELECT lane, id, message_id::text, aggregate_type, aggregate_id, event_type, exchange, routing_key, content_type,
        headers::text, left(trace_context ->> 'traceparent', 56), trace_context ->> 'tracestate', payload,
        payload_bytes, created_at, attempts, 0, NULL, 0::bigint, false, NULL::text,
        written_as
    FROM outbox.message
"""
NUMBERS = ["1.50", "-0.0", "1e3", "1e30", "0.1", "12345678901234567890", *map(str, INTEGERS)]


def random_headers(random: Random, depth: int = 0) -> str:
    """Return JSON of an object, most of them flat; PostgreSQL takes each."""

    def value() -> str:
        match random.randrange(9):
            case 0:
                return random.choice(NUMBERS)
            case 1:
                return random.choice(["true", "false", "null"])
            case 2 if depth < 3:
                return random_headers(random, depth + 1)
            case 3 if depth < 3:
                return "[" + ", ".join(value() for _ in range(random.randrange(3))) + "]"
            case _:
                return json.dumps(random.choice(TEXTS) + str(random.randrange(99)), ensure_ascii=random.random() < 0.5)

    names = random.sample(NAMES, random.randrange(4))
    return "{" + ",".join(f"{json.dumps(name)}:{value()}" for name in names) + "}"


async def test_rows_that_postgres_prints_are_written_as_by_the_library(database_url: str) -> None:
    count = 20 * settings().max_examples  # 100,000 in `make test-codec`
    random = Random(count)
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        columns = "aggregate_type, aggregate_id, event_type, headers, trace_context, payload, created_at"
        async with connection.cursor().copy(f"COPY outbox.message ({columns}) FROM STDIN") as copy:
            for number in range(count):
                trace = {"traceparent": random.choice(TRACEPARENTS).decode()} if random.random() < 0.5 else None
                await copy.write_row((
                    random.choice(["customer", "é", "😀"]),
                    random.choice([None, str(number), "é"]),
                    "InvoiceIssued",
                    random_headers(random) if random.random() < 0.9 else None,
                    trace and json.dumps(trace),
                    json.dumps(random.choice(TEXTS)),
                    random.choice(["1969-12-31", "2026-01-01", "2200-01-01"]),
                ))  # fmt: skip
        async with connection.cursor(binary=True) as cursor:
            give_rows(cursor)
            rows: list[Any] = await (await cursor.execute(ROWS)).fetchall()

    assert len(rows) == count
    by_pure, by_compiled = encoder(frames.Encoder, frame_max=0), encoder(codec.Encoder, frame_max=0)
    refused = 0
    for row in rows:
        pure, compiled = by_pure.encode([row], ()), by_compiled.encode([row], ())
        assert (compiled.frames, set(compiled.refused)) == (pure.frames, set(pure.refused))
        refused += len(compiled.refused)
        if not compiled.refused:
            _, header, *_ = decode(compiled.frames)
            library = ContentHeader(properties=properties(row, IDENTITY, redelivered=False), body_size=len(row.body))
            assert dict(header.properties) == dict(decode_header(library.marshal()).properties)
    assert 0 < refused < count / 2
