"""A handler's annotation decides what it gets of the body; what cannot be read or decoded is told by name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs
from typing_extensions import TypedDict

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.consume.apply.handlers import collect_handlers
from relay.errors import ConfigurationError, InvalidPayloadError
from tests.consume.effects import Queue, Table, received, running
from tests.consume.policies import QUICK
from tests.support.eventually import eventually

if TYPE_CHECKING:
    from fractions import Fraction

Connection = psycopg.AsyncConnection
BODY = b'{"invoice": 42, "amount": 9.90}'


class Model(BaseModel):
    invoice: int
    amount: Decimal


@dataclass
class Data:
    invoice: int
    amount: Decimal


class Typed(TypedDict):
    invoice: int
    amount: Decimal


@on("Counted")
async def plain(message: Message, connection: Connection) -> None: ...


@on("Counted")
async def raw(message: Message[bytes], connection: Connection) -> None: ...


@on("Counted")
async def bare(message, connection) -> None: ...  # type: ignore[no-untyped-def]


@on("Counted")
async def model(message: Message[Model], connection: Connection) -> None: ...


@on("Counted")
async def quoted(message: "Message[Model]", connection: "Fraction") -> None: ...


@on("Counted")
async def data(message: Message[Data], connection: Connection) -> None: ...


@on("Counted")
async def typed(message: Message[Typed], connection: Connection) -> None: ...


@on("Counted")
async def anything(message: Message[Any], connection: Connection) -> None: ...


@on("Counted", batch=True)
async def models(messages: Sequence[Message[Model]], connection: Connection) -> None: ...


@on("Counted", batch=True)
async def model_list(messages: list[Message[Model]], connection: Connection) -> None: ...


@on("Counted", batch=True)
async def bodies(messages: Sequence[Message], connection: Connection) -> None: ...


FITTING: dict[str, Any] = {"invoice": 42, "amount": Decimal("9.90")}


@pytest.mark.parametrize(
    ("handler", "payload"),
    [
        (plain, BODY),
        (raw, BODY),
        (bare, BODY),
        (model, Model(**FITTING)),
        (quoted, Model(**FITTING)),
        (data, Data(**FITTING)),
        (typed, FITTING),
        (anything, {"invoice": 42, "amount": 9.9}),
        (models, Model(**FITTING)),
        (model_list, Model(**FITTING)),
        (bodies, BODY),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_annotation_decides_what_the_payload_is(handler: Any, payload: object) -> None:
    ((function, argument),) = collect_handlers([handler]).calls([received(BODY)])
    (message,) = argument if isinstance(argument, list) else [argument]

    assert function is handler
    assert message.payload == payload
    assert message.body == BODY


@on("Counted")
async def of_nothing(message: Message["Fraction"], connection: Connection) -> None: ...


@on("Counted")
async def of_a_connection(message: Message[Connection], connection: Connection) -> None: ...


@on("Counted")
async def turned_around(connection: Connection, message: Message) -> None: ...


@on("Counted")
async def of_many(messages: Sequence[Message], connection: Connection) -> None: ...


@on("Counted", batch=True)
async def of_one(message: Message[Model], connection: Connection) -> None: ...


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (of_nothing, "(name 'Fraction' is not defined)"),
        (of_a_connection, "(Unable to generate pydantic-core schema for <class 'psycopg.AsyncConnection'>"),
        (turned_around, "(it is called with a Message)"),
        (of_many, "(it is called with a Message)"),
        (of_one, "(with batch=True it is called with a list). Annotate it as Sequence[Message[Payload]]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_annotation_that_tells_no_payload_is_refused_by_name(handler: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^handler {handler.__name__}: .*{re.escape(words)}"):
        collect_handlers([handler])


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        (b'{"invoice": "secret", "amount": 1}', "invoice: int_parsing"),
        (b'{"amount": "secret"}', "invoice: missing, amount: decimal_parsing"),
        (b"secret", "body: json_invalid"),
        (b"\xff\x00", "body: json_invalid"),
        (b"", "body: json_invalid"),
    ],
)
def test_a_body_that_does_not_fit_is_told_without_its_values(body: bytes, faults: str) -> None:
    message = received(body)

    with pytest.raises(InvalidPayloadError) as raised:
        list(collect_handlers([model]).calls([message]))

    assert str(raised.value) == f"Counted {message.message_id}: the body does not fit what its handler takes: {faults}"
    assert "secret" not in repr(raised.getrepr(style="short"))


def test_of_many_faults_the_first_are_told() -> None:
    @on("Counted")
    async def numbers(message: Message[list[int]], connection: Connection) -> None: ...

    with pytest.raises(InvalidPayloadError, match=r"0: int_type, 1: int_type, 2: int_type, and 7 more$"):
        list(collect_handlers([numbers]).calls([received(b"[" + b"null," * 9 + b"null]")]))


async def test_what_fits_is_applied_and_what_does_not_is_a_failed_try_alone(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    @on("Counted", batch=True)
    async def note(messages: Sequence[Message[Data]], connection: Connection) -> None:
        for message in messages:
            await connection.execute(
                "INSERT INTO effect (message_id, number) VALUES (%s, %s)", [message.message_id, message.payload.invoice]
            )

    await queue.send(b'{"invoice": "secret", "amount": 1}', key="b")
    await queue.send(BODY)

    consumer = Consumer(
        queue.name, [note], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=1, batch_size=10, backoff=QUICK)
    )
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 1, "the one that fits is applied")
            await eventually(lambda: consumer.counters.failed >= 1, "the other one has failed")

    assert await table.numbers() == [42]
    (error,) = {event["error"] for event in events if event["event"] == "message.failed"}
    assert error.endswith("the body does not fit what its handler takes: invoice: int_parsing")
    assert "secret" not in repr(events)
