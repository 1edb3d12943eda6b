"""An assertion returns the row that is wanted, or says which rows come near and what of them is otherwise."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import psycopg
import pytest
from pydantic import BaseModel, ValidationError
from sqlalchemy import create_engine
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from relay.outbox import Event, add, event
from relay.testing import AsyncOutbox, Outbox

DUE = datetime(2026, 12, 1, 12, tzinfo=UTC)
LINES = [{"article": "A-1", "count": 2}, {"article": "B-7", "count": 1}]
ISSUED = Event("Invoice", "42", "InvoiceIssued", {"amount": 12.5, "due": DUE, "lines": LINES, "paid": False})
PAID = Event("Invoice", "42", "InvoicePaid", {"amount": 12.5})
OTHER = Event("Invoice", "43", "InvoiceIssued", {"amount": 99, "lines": []})


class Issued(BaseModel):
    amount: Decimal
    due: datetime


@dataclass
class Paid:
    amount: float


@pytest.fixture
def outbox(connection: psycopg.Connection) -> Outbox:
    add(connection, ISSUED, PAID, OTHER)
    return Outbox(connection)


def failure(assertion: Callable[..., object], *arguments: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as failed:
        assertion(*arguments, **options)
    return str(failed.value)


def test_rows_are_listed_in_the_order_in_which_they_were_written(outbox: Outbox) -> None:
    assert outbox.all() == [ISSUED, PAID, OTHER]
    assert outbox.all("InvoiceIssued") == [ISSUED, OTHER]
    assert outbox.all(key=("Invoice", "42")) == [ISSUED, PAID]
    assert outbox.all("InvoiceIssued", key="43") == [OTHER]
    assert outbox.all(key=43) == outbox.all(key=("Invoice", 43)) == [OTHER]


@pytest.mark.parametrize(
    "payload",
    [
        {"amount": 12.5},
        {"due": DUE, "lines": [{"article": "A-1"}, {"count": 1}]},
        {"paid": False},
        '{"amount": 12.50}',
        lambda payload: payload["amount"] > 10,
    ],
)
def test_a_payload_may_have_more_than_is_wanted(outbox: Outbox, payload: Any) -> None:
    written = outbox.assert_written("InvoiceIssued", key=("Invoice", "42"), payload=payload, count=1)

    assert written.message_id == ISSUED.message_id


def test_a_wanted_payload_may_be_a_model_or_a_dataclass(outbox: Outbox) -> None:
    outbox.assert_written("InvoicePaid", payload=Paid(12.5))

    message = failure(outbox.assert_written, "InvoicePaid", payload=Issued(amount=Decimal("12.5"), due=DUE))

    assert "payload.amount is 12.5, not '12.5'\n    payload.due is missing" in message


def test_the_nearest_rows_come_with_what_is_different(outbox: Outbox) -> None:
    message = failure(
        outbox.assert_written,
        "InvoiceIssued",
        key=("Invoice", "42"),
        payload={"amount": 13, "paid": 0, "lines": [{"article": "A-2"}], "currency": "EUR"},
    )

    assert message.splitlines() == [
        (
            "no InvoiceIssued with key ('Invoice', '42') and payload {'amount': 13, 'paid': 0, 'lines': [{'article': "
            "'A-2'}], 'currency': 'EUR'} was written. The outbox has, the nearest first:"
        ),
        (
            '  InvoiceIssued of Invoice 42: {"amount":12.5,"due":"2026-12-01T12:00:00+00:00","lines":[{"article":"A-1",'
            '"count":2},{"article":"B-7","count":1}],"paid":false}'
        ),
        "    payload.amount is 12.5, not 13",
        "    payload.paid is False, not 0",
        "    payload.lines has 2 items, not 1",
        "    payload.lines[0].article is 'A-1', not 'A-2'",
        "    payload.currency is missing",
        '  InvoiceIssued of Invoice 43: {"amount":99,"lines":[]}',
        "    key is ('Invoice', '43'), not ('Invoice', '42')",
        "    payload.amount is 99, not 13",
        "    payload.paid is missing",
        "    payload.lines has 0 items, not 1",
        "    payload.currency is missing",
        '  InvoicePaid of Invoice 42: {"amount":12.5}',
        "    event_type is 'InvoicePaid', not 'InvoiceIssued'",
        "    payload.amount is 12.5, not 13",
        "    payload.paid is missing",
        "    payload.lines is missing",
        "    payload.currency is missing",
    ]


def test_an_empty_outbox_is_said_to_be_empty(connection: psycopg.Connection) -> None:
    message = failure(Outbox(connection).assert_written, "InvoiceIssued")

    assert message == "no InvoiceIssued was written: the outbox is empty"
    counted = failure(Outbox(connection).assert_written, "InvoiceIssued", count=1)
    assert counted == "InvoiceIssued was written 0 times, not 1: the outbox is empty"


def test_a_long_list_and_a_long_payload_are_cut(connection: psycopg.Connection) -> None:
    add(connection, *(Event("Note", str(number), "Noted", {"text": "x" * 5000}) for number in range(9)))

    message = failure(Outbox(connection).assert_written, "Noted", key="9")

    assert message.endswith("\n  and 4 more")
    assert len(message) < 2000


def test_a_predicate_that_does_not_hold_is_named(outbox: Outbox) -> None:
    def is_large(payload: dict[str, Any]) -> bool:
        return bool(payload["amount"] > 1000)

    message = failure(outbox.assert_written, "InvoicePaid", payload=is_large)

    assert message.startswith("no InvoicePaid with is_large was written.")
    assert "    is_large does not hold" in message


def test_a_predicate_is_asked_only_of_rows_of_its_type_and_key(outbox: Outbox) -> None:
    outbox.assert_written("InvoiceIssued", key="43", payload=lambda payload: not payload["lines"])


def test_another_count_lists_what_is_there(outbox: Outbox) -> None:
    assert outbox.assert_written("InvoiceIssued", count=2) == ISSUED
    assert failure(outbox.assert_written, "InvoiceIssued", count=1) == (
        "InvoiceIssued was written 2 times, not 1:\n"
        '  InvoiceIssued of Invoice 42: {"amount":12.5,"due":"2026-12-01T12:00:00+00:00","lines":[{"article":"A-1",'
        '"count":2},{"article":"B-7","count":1}],"paid":false}\n'
        '  InvoiceIssued of Invoice 43: {"amount":99,"lines":[]}'
    )
    assert failure(outbox.assert_written, "InvoiceIssued", payload={"lines": []}, count=2).splitlines() == [
        "InvoiceIssued with payload {'lines': []} was written 1 times, not 2:",
        '  InvoiceIssued of Invoice 43: {"amount":99,"lines":[]}',
        (
            '  InvoiceIssued of Invoice 42: {"amount":12.5,"due":"2026-12-01T12:00:00+00:00","lines":[{"article":"A-1",'
            '"count":2},{"article":"B-7","count":1}],"paid":false}'
        ),
        "    payload.lines has 2 items, not 0",
        '  InvoicePaid of Invoice 42: {"amount":12.5}',
        "    event_type is 'InvoicePaid', not 'InvoiceIssued'",
        "    payload.lines is missing",
    ]
    with pytest.raises(ValueError, match="assert_nothing_written"):
        outbox.assert_written("InvoiceIssued", count=0)


def test_what_must_not_be_there_is_listed(outbox: Outbox) -> None:
    outbox.assert_nothing_written("InvoiceCancelled")
    outbox.assert_nothing_written("InvoicePaid", key="43")
    assert failure(outbox.assert_nothing_written, "InvoicePaid") == (
        'InvoicePaid was written:\n  InvoicePaid of Invoice 42: {"amount":12.5}'
    )
    outbox.clear()
    outbox.assert_nothing_written()


def test_a_payload_is_decoded_as_the_type_that_is_asked_for(outbox: Outbox) -> None:
    issued, paid = outbox.assert_written("InvoiceIssued"), outbox.assert_written("InvoicePaid")

    assert issued.payload(Issued) == Issued(amount=Decimal("12.5"), due=DUE)
    assert (paid.payload(), paid.payload(dict), paid.payload(Paid)) == ({"amount": 12.5}, {"amount": 12.5}, Paid(12.5))
    with pytest.raises(ValidationError):
        paid.payload(Issued)
    with pytest.raises(TypeError, match=r"the payload of InvoicePaid of Invoice 42: .* is a dict, no list"):
        paid.payload(list)


def test_bytes_are_no_json(connection: psycopg.Connection) -> None:
    add(connection, Event("Scan", None, "Scanned", b"\x89PNG", content_type="image/png"))
    written = Outbox(connection).assert_written("Scanned", payload=b"\x89PNG")

    assert (written.payload(), written.key) == (b"\x89PNG", ("Scan", None))
    with pytest.raises(TypeError, match=r"the payload of Scanned of Scan: b'\\x89PNG' is bytes, no JSON for Paid"):
        written.payload(Paid)
    assert "payload is b'\\x89PNG', not b'GIF'" in failure(Outbox(connection).assert_written, "Scanned", payload=b"GIF")


def test_a_row_equals_an_event_of_the_same_content(outbox: Outbox) -> None:
    (paid,) = outbox.all("InvoicePaid")

    assert paid == Event("Invoice", "42", "InvoicePaid", '{"amount": 12.50}')
    assert paid != Event("Invoice", "42", "InvoicePaid", {"amount": 12.5}, headers={"source": "till"})
    assert paid != Event("Invoice", "43", "InvoicePaid", {"amount": 12.5})
    assert paid in outbox.all()
    assert paid != "InvoicePaid"


def test_values_may_be_matchers(outbox: Outbox) -> None:
    outbox.assert_written("InvoicePaid", payload={"amount": pytest.approx(12.5000001)})
    outbox.assert_written("InvoiceIssued", key=42, payload={"amount": Decimal("12.5"), "due": ANY, "paid": ANY})

    message = failure(outbox.assert_written, "InvoicePaid", payload={"amount": pytest.approx(12)})
    assert "payload.amount is 12.5, not 12 ±" in message


@pytest.mark.parametrize(
    ("content_type", "body"), [("text/plain", "hello"), ("application/octet-stream", b"\xff\x00"), (None, '"hello"')]
)
def test_text_is_compared_with_each_row_by_its_kind(
    outbox: Outbox, connection: psycopg.Connection, content_type: str, body: Any
) -> None:
    add(connection, Event("Mail", "1", "MailSent", body, content_type=content_type))

    outbox.assert_written("MailSent", payload=body)
    assert "payload is JSON, and b'nothing' is not" in failure(outbox.assert_written, "InvoicePaid", payload="nothing")


def test_a_predicate_that_raises_names_its_error_and_the_other_rows_are_asked(outbox: Outbox) -> None:
    outbox.assert_written("InvoiceIssued", payload=lambda payload: payload["paid"] is False)

    message = failure(outbox.assert_written, "InvoicePaid", payload=lambda payload: payload["sum"])
    assert "<lambda> raised KeyError('sum')" in message


def test_a_class_is_no_payload(outbox: Outbox) -> None:
    with pytest.raises(TypeError, match="payload is the class Paid: give an object of it"):
        outbox.assert_written("InvoicePaid", payload=Paid)


def test_what_only_sql_can_write_is_read(connection: psycopg.Connection) -> None:
    statement = (
        "INSERT INTO outbox.message (aggregate_type, event_type, payload, available_at) VALUES ('a', %s, %s, %s)"
    )
    digits = "1" * 5000
    for name, moment in {"First": "-infinity", "Last": "infinity", "Late": "20000-01-01"}.items():
        connection.execute(statement, [name, digits, moment])

    rows = Outbox(connection).all()

    assert [row.available_at and row.available_at.year for row in rows] == [1, 9999, 9999]
    assert rows[0].payload() == Decimal(digits)


async def test_a_target_of_another_kind_is_refused(connection: psycopg.Connection, database_url: str) -> None:
    engine = create_async_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with pytest.raises(TypeError, match=r"OperationalError is no connection or session of psycopg 3"):
        Outbox(psycopg.OperationalError()).all()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="AsyncSession is asynchronous: use AsyncOutbox"):
        Outbox(AsyncSession(engine)).all()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Connection is not asynchronous: use Outbox"):
        await AsyncOutbox(connection).all()  # type: ignore[arg-type]


def test_the_callers_row_factory_and_schema_do_not_matter(database_url: str) -> None:
    with psycopg.connect(database_url, row_factory=psycopg.rows.dict_row) as connection:
        connection.execute("ALTER SCHEMA outbox RENAME TO events")
        connection.execute("ALTER TABLE events.message ALTER id SET DEFAULT nextval('events.message_id_seq')")
        add(connection, PAID, schema="events")

        assert Outbox(connection, schema="events").all() == [PAID]
        connection.rollback()


def test_an_id_of_a_payload_is_wanted_as_a_uuid(connection: psycopg.Connection) -> None:
    add(connection, Event("Order", "1", "OrderPlaced", {"order": UUID(int=1)}))

    Outbox(connection).assert_written("OrderPlaced", payload={"order": UUID(int=1)})


@event("InvoiceReminded", version=2, key=("Invoice", "number"))
@dataclass
class Reminded:
    number: int
    due: datetime


@event("InvoiceReminded", version=1, key=("Invoice", "number"))
@dataclass
class RemindedOnce:
    number: int


def test_a_declared_event_is_asked_for_by_its_class(outbox: Outbox, connection: psycopg.Connection) -> None:
    reminded = Reminded(42, DUE)
    add(connection, reminded)

    row = outbox.assert_written(Reminded, key=42, payload={"due": DUE})
    assert row == reminded
    assert row.payload(Reminded) == reminded
    assert outbox.all(Reminded) == [reminded]
    outbox.assert_written("InvoiceReminded", payload=reminded)
    outbox.assert_nothing_written(RemindedOnce)
    assert failure(outbox.assert_written, RemindedOnce).startswith("no InvoiceReminded of version 1")
    assert "headers.x-event-version is '2', not '1'" in failure(outbox.assert_written, RemindedOnce)


def test_a_class_that_is_not_declared_is_refused(outbox: Outbox) -> None:
    with pytest.raises(TypeError, match="the class Issued is not declared: put @event"):
        outbox.assert_written(Issued)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Reminded(42, DUE), "an object of Reminded: give the class, and key= or payload= for values"),
        (PAID, "an object of Event: give a name or a declared class"),
    ],
)
def test_an_event_itself_is_no_type_of_events(outbox: Outbox, given: Any, words: str) -> None:
    for ask in (outbox.all, outbox.assert_written, outbox.assert_nothing_written):
        with pytest.raises(TypeError, match=words):
            ask(given)


@pytest.mark.parametrize("kind", ["psycopg", "sqlalchemy"])
def test_an_outbox_without_tables_names_the_remedy(database_url: str, kind: str) -> None:
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with psycopg.connect(database_url) as plain, Session(engine) as session:
        outbox = Outbox(plain if kind == "psycopg" else session, schema="elsewhere")
        with pytest.raises((psycopg.errors.UndefinedTable, ProgrammingError)) as missing:
            outbox.assert_nothing_written()
    engine.dispose()

    assert "`relay migrate` makes the tables of schema elsewhere" in missing.value.__notes__[0]
