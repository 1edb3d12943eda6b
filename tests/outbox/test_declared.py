"""Events that an application declares once: what is written of them, and what is refused."""

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, NotRequired
from uuid import UUID

import psycopg
import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from relay.errors import ConfigurationError
from relay.outbox import Event, FieldError, HeaderError, PayloadError, add, add_many, event, event_of, upcast
from relay.outbox.row import row_of
from tests.outbox.conftest import MessageTable

CUSTOMER = UUID("6f5c1b1e-7a06-4f5c-9f6a-3f1f4f7b8a10")


class Line(BaseModel):
    amount: Decimal
    note: Any = None


@event("InvoiceIssued", version=2, key=("customer", "customer_id"))
class Model(BaseModel):
    customer_id: int
    lines: list[Line]
    due: date = date(2026, 12, 1)


@event("InvoiceIssued", version="b", key=("customer", "customer_id"))
@dataclass(frozen=True, slots=True)
class Data:
    customer_id: UUID
    amount: Decimal
    tags: set[str] = field(default_factory=set)
    rate: float | None = None


@event("InvoiceIssued", key=("customer", None))
class Typed(TypedDict):
    amount: Decimal
    at: NotRequired[datetime]


@event("Renamed", key=("customer", "customer_id"))
class Renamed(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    customer_id: int = Field(alias="customerId")


MODEL = Model(customer_id=17, lines=[Line(amount=Decimal("9.90"))])


@pytest.mark.parametrize(
    ("declared", "key", "headers", "payload"),
    [
        (
            MODEL,
            "17",
            {"x-event-version": "2"},
            {"customer_id": 17, "lines": [{"amount": "9.90", "note": None}], "due": "2026-12-01"},
        ),
        (
            Data(CUSTOMER, Decimal("1.50"), {"a"}),
            str(CUSTOMER),
            {"x-event-version": "b"},
            {"customer_id": str(CUSTOMER), "amount": "1.50", "tags": ["a"], "rate": None},
        ),
        (Typed(amount=Decimal(2)), None, None, {"amount": "2"}),
        (
            Typed(amount=Decimal(2), at=datetime(2026, 1, 2, tzinfo=UTC)),
            None,
            None,
            {"amount": "2", "at": "2026-01-02T00:00:00Z"},
        ),
        (Renamed.model_validate({"customerId": 3}), "3", None, {"customerId": 3}),
    ],
)
def test_an_instance_is_written_by_its_declaration(declared: Any, key: str, headers: Any, payload: Any) -> None:
    row = row_of(declared, None)

    assert (row.aggregate_type, row.aggregate_id) == ("customer", key)
    assert row.event_type in ("InvoiceIssued", "Renamed")
    assert json.loads(row.headers or "null") == headers
    assert json.loads(row.payload or "") == payload
    assert row.content_type is None


def test_declared_events_are_written_with_others(module_url: str, table: MessageTable) -> None:
    with psycopg.connect(module_url) as connection:
        add(connection, MODEL, [Typed(amount=Decimal(1)), Event("customer", 1, "Plain", {})])
        add_many(connection, [Data(CUSTOMER, Decimal(number)) for number in range(60)])

    assert [row["event_type"] for row in table.rows()] == ["InvoiceIssued", "InvoiceIssued", "Plain"] + 60 * [
        "InvoiceIssued"
    ]


def test_an_instance_becomes_an_event_with_more_fields() -> None:
    due = datetime(2027, 1, 1, tzinfo=UTC)

    made = event_of(
        MODEL, headers={"tenant": "a"}, message_id=CUSTOMER, routing_key="r", exchange="e", available_at=due
    )

    row = row_of(made, None)
    assert json.loads(row.headers or "") == {"tenant": "a", "x-event-version": "2"}
    assert (row.message_id, row.exchange, row.routing_key, row.available_at) == (CUSTOMER, "e", "r", due)


def test_a_header_with_another_version_is_refused() -> None:
    with pytest.raises(HeaderError, match=r"headers\.x-event-version is 2 by its declaration"):
        event_of(MODEL, headers={"x-event-version": 3})


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (
            Model(customer_id=1, lines=[Line(amount=Decimal(1)), Line(amount=Decimal(2), note=object())]),
            r"payload\.lines\[1\]\.note is of type object, which JSON does not have",
        ),
        (
            Model(customer_id=1, lines=[Line(amount=Decimal(1), note={"rate": float("nan")})]),
            r"payload\.lines\[0\]\.note\.rate .*NaN",
        ),
        (Data(CUSTOMER, Decimal(1), rate=float("inf")), r"payload\.rate .*NaN or an infinity"),
        (Data(CUSTOMER, "secret"), r"payload\.amount does not fit its declaration: decimal_parsing$"),  # type: ignore[arg-type]
        (Data(CUSTOMER, None, "secret"), r"payload\.amount does .*: decimal_type, and 1 more$"),  # type: ignore[arg-type]
        (Typed(amount=Decimal(1), more=2), r"payload\.more is not in its declaration"),  # type: ignore[typeddict-unknown-key]
        (Typed(), r"payload\.amount does not fit its declaration: missing"),  # type: ignore[typeddict-item]
        (
            Model.model_construct(customer_id=1, lines=[Line.model_construct(amount="secret")]),  # type: ignore[arg-type]
            r"payload\.lines\[0\]\.amount does not fit",
        ),
    ],
)
def test_what_handlers_could_not_read_is_refused_with_its_path(declared: Any, words: str) -> None:
    with pytest.raises(PayloadError, match=words) as raised:
        row_of(declared, None)

    assert "secret" not in str(raised.value)


class Number(int, Enum):
    ONE = 1


def test_a_number_of_an_enum_is_a_key_as_the_payload_has_it() -> None:
    assert row_of(Event("customer", Number.ONE, "Numbered", {}), None).aggregate_id == "1"


@pytest.mark.parametrize("payload", [{"a": float("nan")}, {"a": {float("inf")}}, {"a": [1, float("nan")]}])
def test_numbers_that_json_loses_are_found_wherever_they_are(payload: Any) -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        note: str | None = None

    with pytest.raises(PayloadError, match=r"payload\.a.*NaN or an infinity"):
        row_of(Event("customer", 1, "Opened", Open(**payload)), None)


def test_numbers_that_are_left_out_or_written_as_text_are_none_that_json_loses() -> None:
    class Hidden(BaseModel):
        rate: float = Field(exclude=True)
        note: str | None = None

    @event("Texts", key=("customer", None))
    @dataclass
    class Texts:
        __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")
        rate: float
        note: str | None = None

    @event("Constants", key=("customer", None))
    @dataclass
    class Constants(Texts):
        __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")

    infinite = float("inf")
    assert row_of(Event("customer", 1, "Hid", Hidden(rate=infinite)), None).payload == '{"note":null}'
    assert row_of(Texts(infinite), None).payload == '{"rate":"Infinity","note":null}'
    with pytest.raises(PayloadError, match="Infinity is no JSON value"):
        row_of(Constants(infinite), None)


def test_a_key_that_is_missing_is_refused() -> None:
    @event("Typed", key=("customer", "number"))
    class Numbered(TypedDict):
        number: int

    with pytest.raises(FieldError, match="aggregate_id is the field 'number', which is missing"):
        row_of(Numbered(), None)  # type: ignore[typeddict-item]
    with pytest.raises(FieldError, match="aggregate_id is the field 'customer_id', which is missing"):
        row_of(Model.model_construct(**dict[str, Any]()), None)


def test_a_key_that_the_table_does_not_take_is_refused() -> None:
    with pytest.raises(FieldError, match="aggregate_id is of type float"):
        row_of(Model.model_construct(customer_id=1.5, lines=[]), None)  # type: ignore[arg-type]


def test_infinities_of_a_model_are_refused_unless_it_writes_them_as_text() -> None:
    class Plain(BaseModel):
        rate: float
        note: str | None = None

    class Text(Plain):
        model_config = ConfigDict(ser_json_inf_nan="strings")

    class Constants(Plain):
        model_config = ConfigDict(ser_json_inf_nan="constants")

    infinite = float("inf")
    with pytest.raises(PayloadError, match=r"payload\.rate .*infinity"):
        row_of(Event("customer", 1, "Rated", Plain(rate=infinite)), None)
    with pytest.raises(PayloadError, match="Infinity is no JSON value"):
        row_of(Event("customer", 1, "Rated", Constants(rate=infinite)), None)
    assert row_of(Event("customer", 1, "Rated", Text(rate=infinite)), None).payload == '{"rate":"Infinity","note":null}'


@dataclass
class Plain:
    customer_id: int


class Child(Model):
    pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Child(customer_id=1, lines=[]), r"Child is no event, only its base class is: put @event above it, too"),
        (Model, "the class Model is no event: make one"),
        (Line(amount=Decimal(1)), r"Line is no event: put @event\(<event type>, key=...\) above its class"),
        (Plain(1), r"Plain is no event: put @event\(<event type>, key=...\) above its class"),
        ({"amount": 1}, "a dict is no event"),
    ],
)
def test_what_is_not_declared_is_refused(given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        row_of(given, None)


class Keys(TypedDict):
    many: list[str]
    flag: bool
    day: "NotRequired[datetime]"
    text: str
    number: int
    maybe: UUID | None
    month: Annotated[date, AfterValidator(str)]


class Unknown(TypedDict):
    amount: Decimal
    unknown: "Nowhere"  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((Keys, name) for name in ("text", "number", "maybe", "month")), (Unknown, "unknown"), (Unknown, "amount")],
)
def test_what_may_be_an_id_or_cannot_be_read_is_declared(kind: type, name: str) -> None:
    assert event("Declared", key=("customer", name))(kind)


class Undeclared:
    customer_id: int


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (Undeclared, {}, "Undeclared is no pydantic model, dataclass or TypedDict; @event stands above @dataclass"),
        (Line, {"key": ("customer", "id")}, "Line has no field 'id'; it has amount, note"),
        (Line, {"key": "customer"}, "takes as key the aggregate type and the field"),
        (Line, {"key": ("", "amount")}, "takes as key the aggregate type and the field"),
        (Line, {"event_type": ""}, "@event takes an event type"),
        (
            Line,
            {"key": ("customer", "amount")},
            "field 'amount' of Line is of type Decimal; an aggregate id is a str, an",
        ),
        (Keys, {"key": ("customer", "many")}, "'many' of Keys is of type list"),
        (Keys, {"key": ("customer", "flag")}, "'flag' of Keys is of type bool"),
        (Keys, {"key": ("customer", "day")}, "'day' of Keys is of type datetime"),
        (Line, {"key": ("customer",)}, "takes as key the aggregate type and the field"),
        (Line, {"version": True}, "version is an int or a text, not True"),
        (Line, {"version": ""}, "version is an int or a text, not ''"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(kind: type, values: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        event(**{"event_type": "Refused", "key": ("customer", None), **values})(kind)


def test_a_class_that_pydantic_cannot_read_is_told_when_it_is_written() -> None:
    @event("Refused", key=("customer", None))
    @dataclass
    class Refused:
        connection: psycopg.Connection

    with pytest.raises(ConfigurationError, match="pydantic cannot read the class: Unable to generate"):
        row_of(Refused(None), None)  # type: ignore[arg-type]


def test_one_upcast_for_two_versions_is_enough() -> None:
    @event("Moved", version=1, key=("customer", "customer_id"))
    class Old(Renamed):
        pass

    @event("Moved", version=2, key=("customer", "customer_id"))
    class New(Renamed):
        pass

    def newer(old: Old) -> New:
        raise NotImplementedError

    def another(old: Old) -> New:
        raise NotImplementedError

    upcast(newer)
    upcast(newer)  # as a notebook's cell that runs again

    with pytest.raises(ConfigurationError, match=r"another does what .*newer does: one of both is enough"):
        upcast(another)


def test_an_upcast_joins_two_versions_of_one_event() -> None:
    @event("Moved", version=9, key=("customer", "customer_id"))
    class First(Renamed):
        pass

    @event("Moved", version=10, key=("customer", "customer_id"))
    class Second(Renamed):
        pass

    def without_annotations(old, new):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def to_another_type(old: Renamed) -> Model:
        raise NotImplementedError

    def to_itself(old: Model) -> Model:
        raise NotImplementedError

    def back(old: Second) -> First:
        raise NotImplementedError

    with pytest.raises(ConfigurationError, match="back takes version 10, and returns the older version 9"):
        upcast(back)

    async def later(old: Renamed) -> Model:
        raise NotImplementedError

    with pytest.raises(ConfigurationError, match="later is an `async def`"):
        upcast(later)

    refused: list[Any] = [without_annotations, to_another_type, to_itself]
    for function in refused:
        with pytest.raises(
            ConfigurationError, match=f"{function.__name__} takes an event, and returns a newer version"
        ):
            upcast(function)
