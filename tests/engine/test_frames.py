"""Both codecs write the same bytes, and say the same as the library's own types."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.config.settings import CloudEvents, Route
from relay.engine.row import Row
from relay.engine.send import codec, frames
from relay.engine.send.codec import Codec
from relay.engine.send.frames import PIECE_BYTES, Encoder
from relay.engine.send.routes import Router
from relay.servers.rabbitmq.content_header import decode_header
from tests.engine.encoders import IDENTITY, Make, decode, encoder
from tests.engine.plain_wire import properties
from tests.engine.rows import ROW

ROOT = Path(__file__).parents[2]
only_compiled = pytest.mark.skipif(codec.CODEC is Codec.PURE, reason="the codec was not built: no compiler")
CODECS = [
    pytest.param(frames.Encoder, id=Codec.PURE),
    pytest.param(codec.Encoder, id=Codec.COMPILED, marks=only_compiled),
]
each_codec = pytest.mark.parametrize("make", CODECS)


def encode(row: Row, by: Encoder, *, redelivered: bool = False) -> tuple[Basic.Publish, ContentHeader, bytes]:
    data, count, refused = by.encode([row], {row.id} if redelivered else set())
    assert (count, refused) == (1, {})
    publish, header, *bodies = decode(data)
    assert all(isinstance(body, ContentBody) for body in bodies)
    return publish, header, b"".join(body.value for body in bodies)


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
rows = st.builds(
    ROW._replace,
    lane=st.integers(0, 15),
    id=st.integers(1, 2**63 - 1),
    aggregate_type=names.map(str.encode),
    aggregate_id=st.none() | names.map(str.encode),
    event_type=names.map(str.encode),
    exchange=st.none() | names.map(str.encode),
    routing_key=st.none() | names.map(str.encode),
    content_type=st.none() | names.map(str.encode),
    headers=st.none() | st.sampled_from([b"{}", b'{"a": 1, "b": [true, null, "x"], "c": {"d": -70000}}']),
    traceparent=st.sampled_from([None, b"none", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]),
    tracestate=st.sampled_from([None, b"a=1,b=2", b"\0"]),
    payload=st.sampled_from([None, b"{}", b'"' + b"x" * 9000 + b'"']),
    payload_bytes=st.binary(max_size=9000),
    created_at=st.integers(-(2**63), 2**63 - 1),
    written_as=st.just(b"") | names.map(str.encode),
).map(lambda row: row if row.payload is None else row._replace(payload_bytes=None))


@each_codec
@given(rows, st.booleans())
def test_frames_decode_to_the_library_s_own_message(make: Make, row: Row, redelivered: bool) -> None:
    publish, header, body = encode(row, encoder(make), redelivered=redelivered)

    address = Router((), "outbox").address(row)
    assert (publish.exchange.encode(), publish.routing_key.encode()) == address
    assert publish.mandatory
    assert dict(header.properties) == dict(properties(row, IDENTITY, redelivered=redelivered))
    assert header.body_size == len(row.body)
    assert body == row.body


@each_codec
def test_a_stamp_is_on_every_message_whatever_the_headers_of_its_row_are(make: Make) -> None:
    stamped = IDENTITY._replace(stamp={"x-replay-id": 7, "x-replayed-at": "2026-11-21T12:00:00Z"})
    row = ROW._replace(headers=b'{"x-replay-id": 1, "mine": 2}')

    _, header, _ = encode(row, make(7, 4096, Router((), "outbox"), stamped))

    headers = header.properties.headers or {}
    assert {name: headers[name] for name in (*stamped.stamp, "mine")} == {**stamped.stamp, "mine": 2}
    assert dict(header.properties) == dict(properties(row, stamped, redelivered=False))
    own = encode(row, encoder(make))[1].properties.headers or {}
    assert own["x-replay-id"] == 1  # `outbox-spark replay` has written it


@each_codec
def test_a_number_in_a_header_arrives_as_it_is(make: Make) -> None:
    row = ROW._replace(headers=b'{"rate": 0.1, "far": [1e300, 7]}')

    by_frames, by_library = (
        encode(row, encoder(make))[1],
        ContentHeader(properties=properties(row, IDENTITY, redelivered=False)),
    )

    for header in (by_frames, decode_header(by_library.marshal())):
        headers = header.properties.headers or {}
        assert (headers["rate"], headers["far"]) == (0.1, [1e300, 7])


@each_codec
def test_one_encoder_keeps_kinds_apart(make: Make) -> None:
    by = encoder(make)
    variants = [
        ROW,
        ROW._replace(event_type=b"InvoicePaid"),
        ROW._replace(aggregate_type=b"order"),
        ROW._replace(content_type=b"application/cloudevents+json"),
        ROW._replace(payload=None, payload_bytes=b"raw"),
        ROW._replace(exchange=b"other"),
        ROW._replace(routing_key=b"other"),
        ROW._replace(aggregate_id=None),
        ROW._replace(written_as=b"billing"),
        ROW._replace(written_as=b"shipping"),
    ]

    for row in (*variants, *variants):
        publish, header, _ = encode(row, by)
        assert dict(header.properties) == dict(properties(row, IDENTITY, redelivered=False))
        assert (publish.exchange.encode(), publish.routing_key.encode()) == Router((), "outbox").address(row)


@each_codec
def test_a_route_that_names_the_aggregate_id_is_filled_in_for_each_row(make: Make) -> None:
    by = encoder(make, Route(exchange="invoices", routing_key="customer.{aggregate_id}"))

    keys = [encode(ROW._replace(aggregate_id=key), by)[0].routing_key for key in (b"1", b"2", b"1")]

    assert keys == ["customer.1", "customer.2", "customer.1"]


@each_codec
def test_no_frame_is_larger_than_the_connection_allows(make: Make) -> None:
    data = encoder(make, frame_max=4096).encode([ROW._replace(payload=b"x" * 20_000)], set()).frames

    while data:
        size, _, _ = pamqp.frame.unmarshal(data)
        assert size <= 4096
        data = data[size:]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW._replace(payload=b"x" * ((1 << 20) + 1)), "max_message_bytes"),
        (ROW._replace(headers=b'{"' + b"n" * 200 + b'": 1}'), "header name"),
        (ROW._replace(headers=b'{"big": 18446744073709551615}'), "header big"),
        (ROW._replace(routing_key=b"k" * 256), "routing key"),
        (ROW._replace(message_id=b"m" * 35), "message_id has 36"),
        (ROW._replace(excess=b"not read"), "not read"),
        (ROW._replace(aggregate_id=b"k" * 4096), "frame_max"),
    ],
)
@each_codec
def test_what_cannot_be_a_message_is_refused_and_leaves_no_bytes(make: Make, row: Row, words: str) -> None:
    by = encoder(make)

    data, count, refused = by.encode([ROW, row], set())
    behind = by.encode([ROW._replace(id=7)], set())

    assert (count, [*refused]) == (2, [1])
    assert words in refused[1]
    headers = [
        frame.properties.headers or {} for frame in decode(data + behind.frames) if isinstance(frame, ContentHeader)
    ]
    assert [each["x-outbox-id"] for each in headers] == [ROW.id, 7]


@each_codec
def test_a_write_ends_with_the_row_that_fills_it(make: Make) -> None:
    rows = [ROW._replace(id=n, payload=b"x" * 400_000) for n in range(1, 6)]

    first = encoder(make).encode(rows, set())

    assert first.rows == 3
    assert len(first.frames) >= frames.PIECE_BYTES


anything = st.none() | st.binary(max_size=300)
hostile_rows = st.builds(
    ROW._replace,
    lane=st.integers(-(2**40), 2**40),
    id=st.integers(-(2**64), 2**64),
    message_id=st.binary(min_size=35, max_size=37),
    aggregate_type=st.binary(max_size=300),
    event_type=st.binary(max_size=300),
    **dict.fromkeys(("aggregate_id", "exchange", "routing_key", "content_type", "payload", "payload_bytes"), anything),
    # The table takes no JSON but objects.
    headers=st.none() | st.binary(max_size=300).map(lambda text: b"{" + text),
    created_at=st.integers(-(2**63), 2**63 - 1),
    excess=st.none() | st.binary(max_size=9),
)
wrong_rows = st.lists(anything | st.integers() | st.text(max_size=3), min_size=19, max_size=23).map(tuple)


@only_compiled
@given(
    st.lists(rows | hostile_rows, max_size=5),
    st.sets(st.integers(1, 2**63 - 1)),
    st.sampled_from([0, 64, 300, 4096, 131_072]),
    st.booleans(),
    st.sampled_from(CloudEvents),
)
def test_the_codecs_write_the_same_bytes_and_refuse_the_same_rows(
    several: list[Row], others: set[int], frame_max: int, by_key: bool, form: CloudEvents
) -> None:
    routes = [Route(exchange="e", routing_key="{aggregate_id}" if by_key else "k", cloudevents=form)]
    redelivered = others | {row.id for row in several[::2]}

    by_each = [
        encoder(make, *routes, frame_max=frame_max).encode(several, redelivered)
        for make in (frames.Encoder, codec.Encoder)
    ]

    pure, compiled = by_each
    assert (compiled.frames, compiled.rows, set(compiled.refused)) == (pure.frames, pure.rows, set(pure.refused))


@each_codec
@pytest.mark.parametrize("form", [CloudEvents.OFF, CloudEvents.STRUCTURED])
def test_refused_rows_are_kept_by_nothing_and_end_a_piece(make: Make, form: CloudEvents) -> None:
    """A row that waits for the next garbage collection waits for long: `collect_rarely`."""
    several = [ROW._replace(id=n, headers=b'{"%s": 1}' % (b"h" * 129), payload=b" " * PIECE_BYTES) for n in range(3)]
    before = [sys.getrefcount(row) for row in several]

    encoded = encoder(make, Route(exchange="outbox", cloudevents=form)).encode(several, ())

    assert (encoded.rows, [*encoded.refused]) == (1, [0])
    assert [sys.getrefcount(row) for row in several] == before


@only_compiled
@given(st.lists(wrong_rows, max_size=3))
def test_what_is_no_row_ends_in_an_error_of_python(several: list[tuple[Any, ...]]) -> None:
    for values in several:
        with contextlib.suppress(AttributeError):
            encoded = encoder(codec.Encoder).encode([values], ())  # type: ignore[list-item]
            assert encoded.refused or decode(encoded.frames)


# In a separate process, as a write to memory that is not there ends it. `further` does not parse: orjson would crash.
WITHOUT_MEMORY = """
import _testcapi
from functools import partial
from relay.engine.send import frames
from relay.engine.send.codec import Encoder
from tests.engine.encoders import encoder
from tests.engine.rows import ROW

large = ROW._replace(headers=b'{"a": [1]}', payload=b"1" * 50_000)
entry = b"\\x01aS" + (20_000).to_bytes(4, "big") + b"x" * 20_000
frames.Encoder.further = lambda *_, **__: entry
make = partial(encoder, Encoder, frame_max=131_072)
expected = make().encode([large, ROW], set())
failures = 0
for failing in range(300):
    tried = make()
    tried.encode([ROW], set())
    _testcapi.set_nomemory(failing, failing + 1)
    try:
        tried.encode([large, ROW], set())
    except MemoryError:
        failures += 1
    finally:
        _testcapi.remove_mem_hooks()
    assert tried.encode([large, ROW], set()) == expected, failing
assert failures
"""


@only_compiled
def test_an_encoder_that_got_no_memory_once_writes_the_next_rows() -> None:
    pytest.importorskip("_testcapi", reason="this Python has no test of memory")

    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
