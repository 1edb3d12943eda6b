"""A handler takes classes that `event` declares, and older versions that `upcast` leads to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, assert_type

import psycopg
import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Inbox, Message, on
from relay.consume.apply.handlers import collect_handlers
from relay.errors import ConfigurationError, InvalidPayloadError
from relay.outbox import event, upcast
from relay.outbox.row import row_of
from relay.testing import Harness
from tests.consume.effects import received

Connection = psycopg.AsyncConnection
KEY = ("counter", "number")


@event("Counted", key=KEY)
class First(TypedDict):
    number: int


@event("Counted", version=2, key=KEY)
@dataclass
class Second:
    number: int
    unit: str


@event("Counted", version=3, key=("counter", "unit"))
class Third(BaseModel):
    number: Decimal
    unit: str


@event("Renamed", key=KEY)
class Renamed(BaseModel):
    number: int


@upcast
def second(old: First) -> Second:
    return Second(old["number"], "one")


@upcast
def third(old: Second) -> Third:
    if old.unit == "dozen":
        raise LookupError("no such unit")
    return Third(number=Decimal(old.number), unit=old.unit)


@on(Third)
async def typed(message: Message[Third], connection: Connection) -> None:
    assert_type(message.payload, Third)


@on(Third)
async def without_annotation(message, connection):  # type: ignore[no-untyped-def]
    pass


@on(Third)  # type: ignore[arg-type]  # to the type checker its payload is bytes
async def bare(message: Message, connection: Connection) -> None:
    pass


@on(First, batch=True)
async def many(messages: list[Message[First]], connection: Connection) -> None:
    assert_type(messages[0].payload["number"], int)


@on(Third, Renamed)
async def several(message: Message[Third | Renamed], connection: Connection) -> None:
    assert_type(message.payload, Third | Renamed)


def call(handlers: Sequence[Any], body: bytes, version: str | None = None, event_type: str = "Counted") -> Any:
    """Return the function that is called, and the payload that it gets."""
    message = received(body, event_type=event_type, headers={} if version is None else {"x-event-version": version})
    found = collect_handlers(handlers)
    assert found.takes(message)
    ((function, argument),) = found.calls([message])
    (given,) = argument if isinstance(argument, list) else [argument]
    assert given.body == body
    return function, given.payload


@pytest.mark.parametrize("handler", [typed, without_annotation, bare])
def test_the_payload_is_an_instance_of_the_declared_class(handler: Any) -> None:
    function, payload = call([handler], b'{"number": "1.50", "unit": "kg"}', "3")

    assert function is handler
    assert payload == Third(number=Decimal("1.50"), unit="kg")


def test_a_typed_dict_comes_as_one_that_may_be_written_again() -> None:
    _, payload = call([many], b'{"number": 1}')

    assert row_of(payload, None).payload == '{"number":1}'


def test_a_handler_of_several_gets_each_as_its_class() -> None:
    assert call([several], b'{"number": 1, "unit": "kg"}', "3")[1] == Third(number=Decimal(1), unit="kg")
    assert call([several], b'{"number": 1}', event_type="Renamed")[1] == Renamed(number=1)


def test_an_older_version_is_made_the_newer_one_step_by_step() -> None:
    assert call([typed], b'{"number": 1, "unit": "kg"}', "2")[1] == Third(number=Decimal(1), unit="kg")
    assert call([typed], b'{"number": 1}')[1] == Third(number=Decimal(1), unit="one")


def test_a_handler_of_the_older_version_goes_first() -> None:
    @on(Second)
    async def old(message: Message[Second], connection: Connection) -> None:
        pass

    assert call([typed, old], b'{"number": 1, "unit": "kg"}', "2") == (old, Second(1, "kg"))
    assert call([typed, old], b'{"number": 1}')[1] == Third(number=Decimal(1), unit="one")


def test_a_handler_without_a_version_goes_before_an_upcast() -> None:
    @on(First)
    async def unversioned(message: Message[First], connection: Connection) -> None:
        pass

    assert call([typed, unversioned], b'{"number": 1}') == (unversioned, {"number": 1})


def test_a_validator_that_ends_an_iteration_leaves_no_message_out() -> None:
    @event("Looked up", version=1, key=KEY)
    class Old(Renamed):
        pass

    @event("Looked up", version=2, key=KEY)
    class New(Renamed):
        pass

    @upcast
    def look_up(old: Old) -> New:
        return New(number=next(each for each in [1, 3] if each == old.number))

    @on(New, batch=True)
    async def all_of_them(messages: list[Message[New]], connection: Connection) -> None:
        pass

    @on(New)
    async def each_of_them(message: Message[New], connection: Connection) -> None:
        pass

    messages = [
        received(b'{"number": %d}' % number, event_type="Looked up", headers={"x-event-version": "1"})
        for number in (1, 2, 3)
    ]
    for handler in (all_of_them, each_of_them):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(collect_handlers([handler]).calls(messages))


def test_an_upcast_that_returns_something_else_fails() -> None:
    @event("Refused", version=1, key=KEY)
    class Old(Renamed):
        pass

    @event("Refused", version=2, key=KEY)
    class New(Renamed):
        pass

    @upcast
    def nothing(old: Old) -> New:
        return None  # type: ignore[return-value]

    @on(New)
    async def handler(message: Message[New], connection: Connection) -> None:
        pass

    with pytest.raises(TypeError, match="nothing returned NoneType, not New"):
        call([handler], b'{"number": 1}', "1", "Refused")


def test_a_newer_version_than_the_declared_one_is_not_taken() -> None:
    @on(Second)
    async def old(message: Message[Second], connection: Connection) -> None:
        pass

    found = collect_handlers([old])
    assert [found.takes(received(b"{}", headers={"x-event-version": version})) for version in ("2", "3", None)] == [
        True,
        False,
        True,
    ]


def test_a_body_that_the_older_version_does_not_take_is_told_without_its_values() -> None:
    with pytest.raises(InvalidPayloadError, match=r"number: int_parsing$"):
        call([typed], b'{"number": "secret", "unit": "kg"}', "2")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Message[Renamed], "is not for Third, which @on names"),
        (Message[bytes], "is not for Third, which @on names"),
        (Message[list[Third]], "is not for Third, which @on names"),
        (Connection, "does not say how to decode messages"),
    ],
)
def test_an_annotation_of_another_class_is_refused(annotation: Any, words: str) -> None:
    async def other(message, connection):  # type: ignore[no-untyped-def]
        pass

    other.__annotations__["message"] = annotation
    with pytest.raises(ConfigurationError, match=words):
        collect_handlers([on(Third)(other)])


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ([BaseModel], {}, "or classes that @event declares"),
        ([Third], {"version": 3}, "the version that @event declares, not version=3"),
    ],
)
def test_what_names_no_event_is_refused(arguments: list[Any], options: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        on(*arguments, **options)


def test_two_handlers_of_one_declared_version_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="event type 'Counted' of version 3 has two handlers"):
        collect_handlers([typed, bare])


def test_a_handler_of_another_class_is_refused_by_the_type_checker() -> None:
    """Checked by mypy."""

    async def renamed(message: Message[Renamed], connection: Connection) -> None:
        pass

    on(Third)(renamed)  # type: ignore[arg-type]


async def test_messages_of_each_version_reach_the_handler(database: DatabaseSettings, broker: BrokerSettings) -> None:
    seen: list[Third] = []

    @on(Third)
    async def note(message: Message[Third], connection: Connection) -> None:
        seen.append(message.payload)

    harness = Harness([note], inbox=Inbox(database, "projection"))

    report = await harness.deliver(First(number=1), Second(2, "kg"), Third(number=Decimal(3), unit="kg"))
    report.raise_first()
    seen.sort(key=lambda each: each.number)  # they have different keys
    assert seen == [Third(number=Decimal(1), unit="one"), *(Third(number=Decimal(n), unit="kg") for n in (2, 3))]

    report = await harness.deliver(Second(4, "dozen"))
    assert [str(error) for error in report.failed] == ["no such unit"]
