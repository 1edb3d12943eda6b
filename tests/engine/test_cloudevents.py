"""Rows of a route with `cloudevents` arrive as events that the library `cloudevents` reads; others are as before."""

from typing import Any
from uuid import UUID

import pytest
from psycopg.types.json import Json

from relay.config.settings import BrokerSettings, CloudEvents, KeyPolicy, Route, Settings
from relay.engine.row import Row
from relay.engine.send.codec import Encoder
from relay.engine.send.message import UnsendableError
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.encoders import encoder
from tests.engine.rows import ROW
from tests.support.cloud_events import by_amqp, by_rabbitmq
from tests.support.eventually import eventually

FORMS = (CloudEvents.BINARY, CloudEvents.STRUCTURED)
each_form = pytest.mark.parametrize("form", FORMS)
FORGED = "forged"


def with_form(settings: Settings, form: CloudEvents, **broker: Any) -> Settings:
    """Return settings by which every row is a CloudEvent of this form."""
    changed = BrokerSettings.model_validate({**settings.broker.model_dump(), **broker})
    return settings.model_copy(update={"routes": (Route(exchange="outbox", cloudevents=form),), "broker": changed})


@each_form
async def test_the_attributes_of_an_event_are_those_of_its_row(
    form: CloudEvents, outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    id_ = await outbox.insert("17", headers=Json({"x-event-version": 2, "tenant": "acme"}))
    async with run_node(with_form(settings, form, cloudevents_source="https://example.org/shop")):
        (message,) = await queue.drain(1)
    event = by_rabbitmq(message)

    assert event.get_attributes() == {
        "specversion": "1.0",
        "id": str(await outbox.column("message_id", id_)),
        "source": "https://example.org/shop",
        "type": "InvoiceIssued",
        "time": await outbox.column("created_at", id_),
        "subject": "customer/17",
        "partitionkey": "customer/17",
        "eventversion": "2",
        "datacontenttype": "application/json",
    }
    assert event.get_data() == {"key": "17"}
    # What our consumers, the quarantine and dead letters go by.
    assert (message.message_id, message.type, message.app_id) == (event.get_id(), "InvoiceIssued", "outbox-relay")
    assert message.timestamp == event.get_attributes()["time"].replace(microsecond=0)
    assert message.headers["x-outbox-id"] == id_
    assert (message.headers["x-aggregate-type"], message.headers["x-aggregate-id"]) == ("customer", "17")
    assert (message.headers["tenant"], message.headers["x-event-version"]) == ("acme", 2)


@each_form
async def test_a_row_without_key_and_version_is_an_event_without_them(
    form: CloudEvents, outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    await outbox.insert(None)
    async with run_node(with_form(settings, form, app_id="shop & co")):
        (message,) = await queue.drain(1)

    found = by_rabbitmq(message).get_attributes()
    assert found["source"] == "/shop%20%26%20co"
    assert set(found) == {"specversion", "id", "source", "type", "time", "datacontenttype"}


@pytest.mark.parametrize("prefix", ["cloudEvents_", "cloudEvents:"])
async def test_a_prefix_of_amqp_1_0_is_read_by_its_binding(
    prefix: str, outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    id_ = await outbox.insert()
    async with run_node(with_form(settings, CloudEvents.BINARY, cloudevents_prefix=prefix)):
        (message,) = await queue.drain(1)

    event = by_amqp(message)
    assert event.get_attributes()["time"] == await outbox.column("created_at", id_)
    assert (event.get_id(), event.get_data()) == (message.message_id, {"key": "1"})
    assert not [name for name in message.headers if name.startswith("ce-")]


# The columns of a row, and what the library makes of its data: of a binary and of a structured event.
DATA: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "an object": ({"payload": '{"a": [1, "é"]}'}, {"a": [1, "é"]}, {"a": [1, "é"]}),
    "a number of forty digits": ({"payload": f"[{'7' * 40}]"}, [int("7" * 40)], [int("7" * 40)]),
    "a text": ({"payload": '"no object"'}, "no object", "no object"),
    "null": ({"payload": "null"}, None, None),
    "what looks like an envelope": ({"payload": '{"a":0,"data":1}'}, {"a": 0, "data": 1}, {"a": 0, "data": 1}),
    "JSON of another type": ({"payload": "[1]", "content_type": "application/vnd.shop+json; v=1"}, [1], [1]),
    "JSON as text": ({"payload": "[1]", "content_type": "text/plain"}, "[1]", b"[1]"),
    "bytes": ({"payload_bytes": b"\0\xff"}, b"\0\xff", b"\0\xff"),
    "no bytes": ({"payload_bytes": b""}, None, b""),
    "bytes said to be JSON": ({"payload_bytes": b"{", "content_type": "application/json"}, "{", b"{"),
    "text in bytes": ({"payload_bytes": b"<a/>", "content_type": "text/xml; charset=utf-8"}, "<a/>", b"<a/>"),
}  # fmt: skip


@each_form
async def test_data_of_every_kind_arrives(
    form: CloudEvents, outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    for columns, _, _ in DATA.values():
        await outbox.insert("1", **columns)
    async with run_node(with_form(settings, form)):
        messages = await queue.drain(len(DATA))

    found = {name: by_rabbitmq(message).get_data() for name, message in zip(DATA, messages, strict=True)}
    assert found == {name: expected[form is CloudEvents.STRUCTURED] for name, (_, *expected) in DATA.items()}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a type with a line break": ({"event_type": "Invoice\nIssued"}, "event_type has the character U+000A"),
    "a key with a control character": ({"aggregate_id": "a\x9f"}, "aggregate_id has the character U+009F"),
    "a kind with DEL": ({"aggregate_type": "a\x7f"}, "aggregate_type has the character U+007F"),
    "a noncharacter": ({"aggregate_id": "a\U0001ffff"}, "aggregate_id has the character U+1FFFF"),
    "a version": ({"headers": Json({"x-event-version": "1\t"})}, "header x-event-version has the character U+0009"),
    "no media type": ({"content_type": "json"}, "content_type 'json' is no media type"),
    "an event already": (
        {"content_type": "Application/CloudEvents+json; charset=utf-8"},
        "says that the payload is a CloudEvent already",
    ),
}


@each_form
async def test_what_is_no_event_is_parked_with_its_reason_and_stops_no_other(
    form: CloudEvents, outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    refused = {}
    for number, (name, (columns, _)) in enumerate(HOSTILE.items()):
        refused[name] = await outbox.insert(**{"key": f"hostile {number}", **columns})
        await outbox.insert(f"neighbour {number}")
    last = await outbox.insert("Schlüssel 😀", event_type="Größe*#{event_type}")

    async with run_node(with_form(settings, form)) as node:
        messages = await queue.drain(len(HOSTILE) + 1)
        await eventually(outbox.is_empty, "the others are parked")
        assert node.snapshot().broker_losses == {}

    assert await outbox.ids("parked") == sorted(refused.values())
    for name, (_, words) in HOSTILE.items():
        assert words in await outbox.column("last_error", refused[name]), name
    found = by_rabbitmq(next(message for message in messages if message.headers["x-outbox-id"] == last))
    assert (found.get_type(), found.get_subject()) == ("Größe*#{event_type}", "customer/Schlüssel 😀")


@each_form
async def test_a_writer_can_not_write_attributes(
    form: CloudEvents, outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    own = {"ce-id": FORGED, "CE-Tenant": FORGED, "cloudEvents:source": FORGED, "cloudEvents_type": FORGED}
    await outbox.insert(headers=Json({**own, "x-outbox-cloudevents": FORGED, "certain": "mine"}))
    async with run_node(with_form(settings, form)):
        (message,) = await queue.drain(1)

    assert FORGED not in message.headers.values()
    assert FORGED not in by_rabbitmq(message).get_attributes().values()
    assert message.headers["certain"] == "mine"


async def test_routes_decide_by_type_also_for_rows_with_an_address(
    outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    routes = (
        Route(event_type="InvoicePaid", exchange="other", cloudevents=CloudEvents.STRUCTURED),
        Route(event_type="Invoice*", exchange="outbox"),
    )
    own = {"ce-id": "the writer's"}
    plain = await outbox.insert("1", headers=Json(own))
    await outbox.insert("1", event_type="InvoicePaid", exchange="outbox", routing_key="mine")
    async with run_node(settings.model_copy(update={"routes": routes})):
        first, second = await queue.drain(2)

    assert (first.headers["x-outbox-id"], first.headers["ce-id"]) == (plain, "the writer's")
    assert (first.content_type, first.body) == ("application/json", b'{"key": "1"}')
    assert (second.content_type, second.routing_key) == ("application/cloudevents+json", "mine")


async def test_an_envelope_over_the_limit_is_parked_with_the_way_out(
    outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    small, large = Json("x" * 500), Json("x" * 900)
    limits = {"max_message_bytes": 1000, "key_policy": KeyPolicy.HOLD}
    row = await outbox.insert("a", payload=large)
    behind = await outbox.insert("a", payload=small)
    await outbox.insert("b", payload=small)
    async with run_node(with_form(settings, CloudEvents.STRUCTURED), **limits):
        (neighbour,) = await queue.drain(1)
        await eventually(outbox.is_empty, "the large one is parked")

    assert neighbour.headers["x-aggregate-id"] == "b"
    assert await outbox.ids("parked") == [row, behind]
    words = await outbox.column("last_error", row)
    assert "as the CloudEvents envelope of 902, are more than max_message_bytes (1000)" in words
    assert 'cloudevents = "binary"' in words

    await outbox.connection.execute(
        "UPDATE outbox.message SET state = 'pending', held_behind = NULL WHERE state = 'parked'"
    )
    async with run_node(with_form(settings, CloudEvents.BINARY), **limits):
        assert await queue.ids(2) == [row, behind]


@each_form
async def test_keys_stay_in_order(
    form: CloudEvents, outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    await outbox.insert_many(500, keys=7)
    async with run_node(with_form(settings, form)):
        messages = await queue.drain(500)

    by_key: dict[str, list[int]] = {}
    for message in messages:
        by_key.setdefault(by_rabbitmq(message).get_subject() or "", []).append(int(str(message.headers["x-outbox-id"])))
    assert len(by_key) == 7
    assert all(ids == sorted(ids) for ids in by_key.values())


EPOCH_MICROSECONDS = 946_684_800_000_000  # 2000-01-01, where PostgreSQL begins to count


@pytest.mark.parametrize(
    ("created_at", "time"),
    [
        (0, "2000-01-01T00:00:00.000000Z"),
        (-1, "1999-12-31T23:59:59.999999Z"),
        (-EPOCH_MICROSECONDS, "1970-01-01T00:00:00.000000Z"),
        (-EPOCH_MICROSECONDS - 1, "1970-01-01T00:00:00.000000Z"),
        (-(2**63), "1970-01-01T00:00:00.000000Z"),
        (2**63 - 1, "2106-02-07T06:28:15.000000Z"),
    ],
)
def test_a_time_beyond_the_timestamp_s_limits_is_the_limit(created_at: int, time: str) -> None:
    frames = encode(ROW._replace(created_at=created_at), CloudEvents.STRUCTURED)

    assert f'"time":"{time}"'.encode() in frames


def test_the_id_is_the_message_id_each_time_that_a_row_is_sent() -> None:
    by = encoder(Encoder, Route(exchange="outbox", cloudevents=CloudEvents.STRUCTURED))

    first, again = (by.encode([ROW], redelivered).frames for redelivered in ((), {ROW.id}))

    envelope = first[first.index(b'{"specversion"') :]
    assert f'"id":"{UUID(ROW.message_id.decode())}"'.encode() in envelope
    assert again.endswith(envelope)


def test_attributes_that_make_the_header_too_large_are_refused() -> None:
    with pytest.raises(UnsendableError, match="frame_max"):
        encode(ROW._replace(aggregate_id=b"k" * 2000), CloudEvents.BINARY)


def encode(row: Row, form: CloudEvents) -> bytes:
    encoded = encoder(Encoder, Route(exchange="outbox", cloudevents=form)).encode([row], ())
    for reason in encoded.refused.values():
        raise UnsendableError(reason)
    return encoded.frames
