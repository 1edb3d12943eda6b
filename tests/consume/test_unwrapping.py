"""The envelope of a structured CloudEvent comes off again, and leaves what the writer wrote, byte for byte."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.consume.cloudevents import unwrapped
from relay.consume.message import WRAPPED
from relay.engine.row import Row
from relay.engine.send import message
from relay.engine.send.cloudevents import FORBIDDEN, attributes, envelope
from relay.engine.send.frames import WRAPPED_ENTRY
from relay.engine.send.message import MessageIdentity
from tests.consume.effects import MakeConsumer, Queue, Table, count, running
from tests.engine.rows import ROW
from tests.support.eventually import eventually

IDENTITY = MessageIdentity(b"outbox-relay", 1 << 20)
TEMPTING = [',"data":', ',"data_base64":', '"', "\\", '\\",\\"data\\":', "}", "é", "😀"]

texts = st.lists(st.sampled_from(TEMPTING) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), min_size=1)
names = texts.map(lambda parts: FORBIDDEN.sub("", "".join(parts)) or "a").map(str.encode)
payloads = st.one_of(
    st.sampled_from(["1" + "0" * 40, "9.90", "1e999", ' {"a": 1,  "a": 2}\n', '"\\ud800"', "null", '{"data":1}']),
    texts.map(lambda parts: json.dumps({"data": "".join(parts)}, separators=(",", ":"))),
).map(str.encode)
rows = st.builds(
    ROW._replace,
    aggregate_type=names,
    aggregate_id=st.none() | names,
    event_type=names,
    content_type=st.sampled_from([None, b"application/json", b"text/plain", b"image/svg+json; a=1"]),
    payload=st.none() | payloads,
    payload_bytes=st.binary(),
)


@given(rows, st.none() | texts.map("".join).map(lambda text: FORBIDDEN.sub("", text)))
def test_what_comes_off_is_what_was_put_on(row: Row, version: str | None) -> None:
    whole = envelope(row, attributes(row, "/shop", version), IDENTITY)

    assert unwrapped(whole) == (row.body, message.content_type(row).decode())


def test_both_ends_mean_the_same_header() -> None:
    assert message.WRAPPED == WRAPPED
    assert WRAPPED_ENTRY[1 : WRAPPED_ENTRY[0] + 1] == WRAPPED.encode()


GOOD = envelope(ROW, attributes(ROW, "/shop", None), IDENTITY)
STRANGE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"no JSON",
    "no data": b'{"specversion":"1.0"}',
    "cut off": GOOD[:-2],
    "not UTF-8": b'{"datacontenttype":"\xff","data":1}',
    "no content type": b'{"specversion":"1.0","data":1}',
    "no object": b'["a","data":1}',
    "no base64": b'{"datacontenttype":"text/plain","data_base64":"*"}',
    "base64 that is no text": b'{"datacontenttype":"text/plain","data_base64":12}',
    "half a text": b'{"datacontenttype":"text/plain","data_base64":"}',
    "empty data": b'{"datacontenttype":"text/plain","data":}',
}


@pytest.mark.parametrize("marker", [True, "structured"])
async def test_a_stranger_s_envelope_is_a_dead_letter_and_stops_no_other(
    marker: Any, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    for body in STRANGE.values():
        await queue.send(body, headers={WRAPPED: marker})
    await queue.send(7)
    consumer = make_consumer(count)
    async with running(consumer):
        await eventually(lambda: consumer.counters.acknowledged == len(STRANGE) + 1, "all are settled")

    assert await table.numbers() == [7]
    letters = await queue.dead()
    assert [letter.body for letter in letters] == list(STRANGE.values())
    assert {letter.headers["x-dead-reason"] for letter in letters} == {"invalid"}
