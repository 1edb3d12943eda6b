"""A handler is called alone with the message that a consumer would give it, without servers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from relay.consume import Inbox, Message, on
from relay.errors import ConfigurationError, InvalidPayloadError
from relay.outbox import Event, FieldError, add, event, upcast
from relay.testing import Harness, Outbox, message

WRITTEN_AT = datetime(2026, 11, 30, 12, tzinfo=UTC)


@event("InvoiceIssued", version=2, key=("invoice", "number"))
@dataclass
class Issued:
    number: int
    amount: float


@event("InvoiceIssued", version=1, key=("invoice", "number"))
@dataclass
class IssuedOnce:
    number: int


@upcast
def with_amount(old: IssuedOnce) -> Issued:
    return Issued(old.number, 0)


@dataclass
class Paid:
    amount: int


PAID = Event("invoice", "42", "InvoicePaid", {"amount": 5}, headers={"source": "till"})
SCAN = Event("scan", None, "Scanned", b"\x89PNG", content_type="image/png", routing_key="scans")


@on("InvoicePaid")
async def book(message: Message[Paid], connection: list[int]) -> None:
    connection.append(message.payload.amount)


@on(Issued, batch=True)
def project(messages: list[Message[Issued]], connection: Any) -> None: ...


async def test_a_handler_is_called_alone() -> None:
    booked: list[int] = []
    await book(message(PAID, handler=book), booked)

    assert booked == [5]


def test_a_declared_event_is_decoded_as_for_its_class() -> None:
    made = message(Issued(42, 12.5))

    assert made.payload == Issued(42, 12.5)
    assert (made.type, made.version, made.aggregate_type, made.aggregate_id) == ("InvoiceIssued", "2", "invoice", "42")
    assert made.routing_key == "invoice.InvoiceIssued"


def test_an_older_version_is_made_into_that_of_the_handler() -> None:
    assert message(IssuedOnce(42)).payload == IssuedOnce(42)
    assert message(IssuedOnce(42), handler=project).payload == Issued(42, 0)


def test_what_a_message_has_besides_may_be_given() -> None:
    made = message(PAID, consumer_name="accounting", redelivered=True, timestamp=WRITTEN_AT)

    assert (made.consumer_name, made.redelivered, made.timestamp) == ("accounting", True, WRITTEN_AT)
    assert (made.payload, made.json(), made.headers["source"]) == (b'{"amount":5}', {"amount": 5}, "till")
    assert made.message_id == PAID.message_id


@pytest.mark.parametrize("given", [PAID, SCAN, Issued(42, 12.5)])
async def test_it_is_what_a_consumer_gives(given: Event | Issued, database_url: str) -> None:
    seen: list[Message[Any]] = []

    @on("*")
    async def keep(message: Message, connection: psycopg.AsyncConnection) -> None:
        seen.append(message)

    with psycopg.connect(database_url) as connection:
        add(connection, given)
        (row,) = Outbox(connection).all()
    delivered = await Harness([keep], inbox=Inbox(database_url, "accounting")).deliver(row)

    delivered.raise_first()
    (from_consumer,) = seen
    made = message(row, consumer_name="accounting", timestamp=from_consumer.timestamp)
    assert made == from_consumer
    of_event = message(given, consumer_name="accounting", timestamp=made.timestamp)
    assert replace(of_event, message_id=made.message_id, payload=made.payload) == made


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: message(Event("invoice", "42", "InvoicePaid", {}), handler=book), InvalidPayloadError, "amount"),
        (lambda: message(SCAN, handler=book), ValueError, "book does not take Scanned"),
        (lambda: message(Event("", "42", "InvoicePaid", {})), FieldError, "aggregate_type"),
        (lambda: message(PAID, handler=with_amount), ConfigurationError, "with_amount is no handler"),
    ],
)
def test_what_a_consumer_would_refuse_is_refused(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
