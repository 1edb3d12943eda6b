"""A copy is the same message, and makes the broker do nothing but carry it."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.consume.classify import Failure, FailureReason, History
from relay.consume.failed.envelope import dead_letter, history_of, pack, restored, retry_copy, unpack

AT = datetime(2026, 11, 22, 9, 30, 0, 123_000, tzinfo=UTC)
LATER = Failure(
    attempts=2,
    first_failed_at=AT,
    failed_at=AT,
    exception="builtins.ValueError",
    words="no",
    reason=None,
    step=2.0,
    wait=1.25,
)
DEAD = Failure(
    attempts=5, first_failed_at=AT, failed_at=AT, exception="ValueError", words="no", reason=FailureReason.EXHAUSTED
)
HEADERS = {
    "x-aggregate-id": "17",
    "number": 7,
    "price": Decimal("1.5"),
    "at": AT.replace(microsecond=0),
    "nested": {"list": [1, "two", True]},
}


def delivered(**properties: object) -> DeliveredMessage:
    came = Basic.Deliver("tag", 3, redelivered=False, exchange="billing", routing_key="customer.InvoiceIssued")
    header = ContentHeader(properties=Basic.Properties(message_id="id", message_type="InvoiceIssued", **properties))  # type: ignore[arg-type]
    return DeliveredMessage(delivery=came, header=header, body=b"body", channel=None)  # type: ignore[arg-type]


def test_a_retry_keeps_the_message_and_tells_its_history() -> None:
    original = delivered(headers=HEADERS, timestamp=AT, app_id="relay", priority=3)

    copy = retry_copy(original, LATER)

    assert (copy.message_id, copy.message_type, copy.timestamp) == ("id", "InvoiceIssued", AT)
    assert (copy.app_id, copy.priority, copy.expiration, copy.delivery_mode) == ("relay", 3, "1250", 2)
    assert copy.headers is not None
    assert copy.headers.items() >= HEADERS.items()
    back = DeliveredMessage(
        delivery=Basic.Deliver("tag", 9, redelivered=False, exchange="", routing_key="queue"),
        header=ContentHeader(properties=copy),
        body=b"body",
        channel=None,  # type: ignore[arg-type]
    )
    assert history_of(back) == History(2, AT)
    first = restored(back, "queue")
    assert (first.exchange, first.routing_key, first.delivery_tag) == ("billing", "customer.InvoiceIssued", 9)


def test_a_dead_letter_that_is_sent_back_begins_anew() -> None:
    copied = retry_copy(delivered(headers=HEADERS), LATER)
    came_back = delivered(headers=copied.headers)

    letter = dead_letter(came_back, DEAD, "projection")

    assert letter.headers is not None
    assert letter.headers["x-dead-reason"] == "exhausted"
    assert letter.headers["x-dead-attempts"] == 5
    assert letter.expiration is None
    assert history_of(delivered(headers=letter.headers)) == History()


def test_what_the_broker_would_act_on_is_left_out() -> None:
    """It would route copies by CC, drop one that has been there before, and close the channel for another's user_id."""
    copy = retry_copy(
        delivered(headers={"CC": ["other"], "BCC": ["other"], "x-death": [], "kept": 1}, user_id="somebody"), LATER
    )

    assert copy.user_id is None
    assert copy.headers is not None
    assert not copy.headers.keys() & {"CC", "BCC", "x-death"}
    assert copy.headers["kept"] == 1


def test_packing_keeps_every_property() -> None:
    original = delivered(headers=HEADERS, timestamp=AT.replace(microsecond=0), correlation_id="c", content_type="text")

    back = unpack(pack(original), b"body", exchange="billing", routing_key="key")

    assert dict(back.header.properties) == dict(original.header.properties)
    assert (back.body, back.exchange, back.routing_key) == (b"body", "billing", "key")


@pytest.mark.parametrize(
    ("told", "history"),
    [
        ({"x-retry-attempts": 2**40}, History()),
        ({"x-retry-attempts": -1}, History()),
        ({"x-retry-attempts": 2, "x-first-failure": "0001-01-01T00:00:00+14:00"}, History(2)),
        ({"x-retry-attempts": 2, "x-first-failure": "yesterday"}, History(2)),
    ],
)
def test_a_history_that_no_table_can_hold_is_none(told: dict[str, Any], history: History) -> None:
    assert history_of(delivered(headers=told)) == history


def test_a_message_of_another_keeps_what_the_library_would_not_send() -> None:
    original = delivered(headers=HEADERS)
    original.header.properties.cluster_id = "eu"

    back = unpack(pack(original), b"body", exchange="billing|événements", routing_key="key")
    copy = retry_copy(back, LATER)

    assert (copy.cluster_id, back.exchange) == ("eu", "billing|événements")
    assert copy.headers is not None
    came_back = unpack(ContentHeader(properties=copy).marshal(), b"body", exchange="", routing_key="queue")
    assert restored(came_back, "queue").exchange == "billing|événements"
