"""What is refused, with which error; and which column a payload goes to."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from pydantic import BaseModel

from relay.config.settings import RelaySettings
from relay.outbox import (
    Event,
    EventError,
    FieldError,
    HeaderError,
    OutboxMessage,
    PayloadError,
    PayloadTooLargeError,
    add,
    add_many,
)
from relay.outbox.row import MAX_PAYLOAD_BYTES, NewRow, row_of

GOOD = Event("Invoice", "7", "InvoiceIssued", "{}")


def encoded(**changes: Any) -> NewRow:
    return row_of(replace(GOOD, **changes), None)


@pytest.mark.parametrize("field", ["aggregate_type", "aggregate_id", "event_type", "content_type"])
def test_an_empty_field_is_refused(field: str) -> None:
    with pytest.raises(FieldError, match=f"{field} is empty"):
        encoded(**{field: ""})


@pytest.mark.parametrize("field", ["exchange", "routing_key"])
def test_the_default_exchange_and_an_empty_routing_key_have_no_name(field: str) -> None:
    assert getattr(encoded(**{field: ""}), field) == ""


TEXT_FIELDS = ["aggregate_type", "aggregate_id", "event_type", "exchange", "routing_key", "content_type"]


@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_a_field_has_255_bytes_of_utf8_at_most(field: str) -> None:
    # + "+json": a content type must stay one of JSON for this payload
    assert getattr(encoded(**{"routing_key": "given", field: "ä" * 125 + "+json"}), field) == "ä" * 125 + "+json"

    with pytest.raises(FieldError, match=f"{field} has 256 bytes of UTF-8; the limit is 255") as refusal:
        encoded(**{field: "ä" * 128})

    assert refusal.value.field == field


@pytest.mark.parametrize("field", TEXT_FIELDS)
@pytest.mark.parametrize(
    ("value", "problem"),
    [("a\0b", "NUL"), ("a\ud800", "surrogate"), (True, "of type bool"), (b"a", "of type bytes"), (1.5, "of type")],
)
def test_a_field_takes_only_text_that_postgresql_can_store(field: str, value: object, problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        encoded(**{field: value})


@pytest.mark.parametrize(
    ("given", "text"), [(7, "7"), (-1, "-1"), (UUID(int=1), "00000000-0000-0000-0000-000000000001"), ("x", "x")]
)
def test_an_id_may_be_a_number_or_a_uuid(given: int | UUID | str, text: str) -> None:
    assert encoded(aggregate_id=given).aggregate_id == text
    with pytest.raises(FieldError, match="aggregate_id is of type Decimal; it takes a str, an int or a UUID"):
        encoded(aggregate_id=Decimal(1))
    with pytest.raises(FieldError, match="event_type is of type int; it takes a str"):
        encoded(event_type=7)


@pytest.mark.parametrize("field", ["aggregate_type", "event_type"])
def test_type_names_are_required(field: str) -> None:
    with pytest.raises(FieldError, match="of type NoneType"):
        encoded(**{field: None})


def test_a_message_id_is_a_uuid() -> None:
    with pytest.raises(FieldError, match="message_id is of type str"):
        encoded(message_id="0190a7c0-5c1e-7bbb-8000-0123456789ab")


def test_each_event_has_a_message_id_of_its_own() -> None:
    assert Event("A", "7", "E", "{}").message_id != Event("A", "7", "E", "{}").message_id


@pytest.mark.parametrize(
    ("value", "problem"),
    [(datetime(2031, 1, 1), "has no time zone"), ("2031-01-01", "of type str")],  # noqa: DTZ001
)
def test_an_instant_is_a_datetime_with_its_time_zone(value: object, problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        encoded(available_at=value)


@pytest.mark.parametrize(
    ("headers", "where"),
    [
        ({"h": b"x"}, r"headers\.h is of type bytes"),
        ({"h": datetime(2031, 1, 1, tzinfo=UTC)}, r"headers\.h is of type datetime"),
        ({"h": Decimal("1.5")}, r"headers\.h is of type Decimal"),
        ({"h": (1, 2)}, r"headers\.h is of type tuple"),
        ({"h": UUID(int=1)}, r"headers\.h is of type UUID"),
        ({"h": 2**63}, r"headers\.h does not fit into 64 bits"),
        ({"h": -(2**63) - 1}, r"headers\.h does not fit into 64 bits"),
        ({"h": float("nan")}, r"headers\.h is nan"),
        ({"h": float("-inf")}, r"headers\.h is -inf"),
        ({"h": 1e19}, r"headers\.h is 1e\+19"),
        ({"h": [{"deep": [0, {1}]}]}, r"headers\.h\[0\]\.deep\[1\] is of type set"),
        ({"h": "a\0"}, r"headers\.h holds a NUL"),
        ({"a\0": 1}, r"headers\.a\? holds a NUL"),
        ({"h": "\udfff"}, r"headers\.h' holds half a surrogate pair"),
        ({"\udfff": 1}, "holds half a surrogate pair"),
        ({7: 1}, r"headers\.7 has a name of type int"),
        ({"ä" * 65: 1}, "has a name of 130 bytes; the limit is 128"),
        ({"h": "x" * 65536}, "headers has 65544 bytes as JSON; the limit is 65536"),
        (["h"], "headers is of type list"),
    ],
)
def test_a_header_that_amqp_cannot_carry_is_refused_by_its_place(headers: object, where: str) -> None:
    with pytest.raises(HeaderError, match=where):
        encoded(headers=headers)


def test_headers_nested_without_end_are_refused() -> None:
    headers: dict[str, Any] = {}
    headers["self"] = headers

    with pytest.raises(HeaderError, match="nested too deeply"):
        encoded(headers=headers)


class Invoice(BaseModel):
    number: int
    total: Decimal


class Attachment(BaseModel):
    data: bytes


@dataclass
class Line:
    price: float


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"b": 1, "a": [None, True, "ä"]}, '{"b":1,"a":[null,true,"ä"]}'),
        ([], "[]"),
        ({"at": datetime(2031, 1, 2, tzinfo=UTC), "id": UUID(int=1)},
         '{"at":"2031-01-02T00:00:00+00:00","id":"00000000-0000-0000-0000-000000000001"}'),
        ({"line": Line(0.5)}, '{"line":{"price":0.5}}'),
        (Invoice(number=7, total=Decimal("1.10")), '{"number":7,"total":"1.10"}'),
        ('{"a" : 1.10}\n', '{"a" : 1.10}\n'),
        (b'{"a" : "\xc3\xa4"}', '{"a" : "ä"}'),
        ("null", "null"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content_type", [None, "application/json", "Application/CloudEvents+JSON; charset=utf-8"])
def test_a_json_payload_goes_to_the_json_column(payload: Any, text: str, content_type: str | None) -> None:
    row = encoded(payload=payload, content_type=content_type)

    assert (row.payload, row.payload_bytes, row.content_type) == (text, None, content_type)


@pytest.mark.parametrize(
    ("payload", "data"), [("grün", b"gr\xc3\xbcn"), (b"\0\xff", b"\0\xff"), (b"{}", b"{}"), ("", b"")]
)
def test_another_payload_goes_to_the_bytes_column(payload: str | bytes, data: bytes) -> None:
    row = encoded(payload=payload, content_type="text/plain; note=application/json")

    assert (row.payload, row.payload_bytes) == (None, data)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ("", "is not JSON"),
        ("hello", "is not JSON"),
        ("{'a': 1}", "is not JSON"),
        ("[1,]", "is not JSON"),
        ("NaN", "NaN is no JSON value"),
        ("\ufeff1", "is not JSON"),
        ('"\ud800"', "is not JSON"),
        ('"\0"', "is not JSON"),
        (b"\xff", "byte 0 is not UTF-8"),
        ("[" * 100_000, "is nested too deeply"),
        (None, "is of type NoneType"),
        (7, "is of type int"),
        ({"n": float("nan")}, r"payload\.n .*NaN or an infinity"),
        ({"n": [1, (Line(float("inf")),)]}, r"payload\.n\[1\]\[0\]\.price .*NaN or an infinity"),
        ({"n": Decimal("1.5")}, r"payload\.n is of type Decimal, which JSON does not have: make it text"),
        ([{"a": 1, "lines": [0, {"price": Decimal("1.5")}]}], r"payload\[0\]\.lines\[1\]\.price .*Decimal"),
        ({"a b": {1}}, r"payload\.'a b' is of type set, which JSON does not have"),
        ({"n": 2**64}, r"payload\.n .*Integer exceeds 64-bit range"),
        ({"deep": [{7: 1}]}, r"payload\.deep\[0\] .*Dict key must be str"),
        ({"s": "\ud800"}, r"payload\.s .*surrogates not allowed"),
        (Attachment(data=b"\xff"), "cannot be written as JSON"),
    ],
)
def test_a_payload_that_is_not_json_is_refused(payload: Any, problem: str) -> None:
    with pytest.raises(PayloadError, match=problem):
        encoded(payload=payload)


@pytest.mark.parametrize("payload", [{}, [], Invoice(number=7, total=Decimal(1)), "\ud800"])
def test_a_payload_of_another_content_type_is_text_or_bytes(payload: Any) -> None:
    with pytest.raises(PayloadError):
        encoded(payload=payload, content_type="text/plain")


def test_a_null_beside_good_numbers_is_no_lost_number() -> None:
    assert encoded(payload={"a": None, "b": 1.5}).payload == '{"a":null,"b":1.5}'


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_the_limit_counts_bytes_of_utf8(content_type: str) -> None:
    event = replace(GOOD, payload='"ä"', content_type=content_type)

    row_of(event, None, max_payload_bytes=4)
    with pytest.raises(PayloadTooLargeError, match="has 4 bytes; the limit is 3") as refusal:
        row_of(event, None, max_payload_bytes=3)

    assert (refusal.value.size, refusal.value.limit) == (4, 3)


def test_the_limit_is_what_the_relay_sends_at_most() -> None:
    assert RelaySettings().max_message_bytes == MAX_PAYLOAD_BYTES


def test_an_error_names_the_event_and_shows_no_payload() -> None:
    with pytest.raises(EventError) as refusal:
        encoded(payload="secret")

    assert str(refusal.value).startswith("event 'InvoiceIssued' of 'Invoice' '7': payload is not JSON")
    assert "secret" not in str(refusal.value)


def test_an_error_stays_one_short_line_for_a_long_name() -> None:
    with pytest.raises(EventError) as refusal:
        encoded(aggregate_type="x\n" * 10_000)

    assert len(str(refusal.value)) < 200
    assert "\n" not in str(refusal.value)


def test_a_payload_that_holds_itself_is_refused() -> None:
    payload: dict[str, Any] = {}
    payload["self"] = [payload]

    with pytest.raises(PayloadError, match=r"payload cannot be written as JSON: Recursion"):
        encoded(payload=payload)


def test_a_default_routing_key_that_is_too_long_is_refused() -> None:
    long = {"aggregate_type": "ä" * 60, "event_type": "e" * 135}

    with pytest.raises(FieldError, match=r"routing_key would be .*256 bytes of UTF-8; the limit is 255"):
        encoded(**long)
    assert encoded(**long | {"event_type": "e" * 134}).routing_key is None
    assert encoded(**long, routing_key="short").routing_key == "short"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ([[GOOD]], "a list is no event: write add"),
        ((each for each in [GOOD]), "a generator is no event"),
        ({"aggregate_type": "Invoice"}, r"Event\(\*\*fields\)"),
        (Event, "the class Event is no event: make one"),
        (object(), "the connection first"),
    ],
)
def test_what_is_no_event_is_told_what_is_meant(given: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        add(object(), given)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=hint):
        OutboxMessage(given)


def test_swapped_arguments_are_told_what_is_meant(module_url: str) -> None:
    with psycopg.connect(module_url) as connection:
        with pytest.raises(TypeError, match="the connection first"):
            add(GOOD, connection)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="one is written by add"):
            add_many(connection, GOOD)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="the connection comes first"):
            add_many(GOOD, [GOOD])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"engine\.begin\(\)"):
        add(sa.create_engine("postgresql+psycopg://"), GOOD)  # type: ignore[call-overload]
