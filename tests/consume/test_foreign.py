"""What others send and say, and PostgreSQL or the AMQP library cannot hold: it stops nobody, and nothing of it is lost.

RabbitMQ takes all of this; the library would refuse to send it, so that here it is sent without its checks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic, Exchange
from pamqp.commands import Queue as QueueMethods
from psycopg.sql import SQL
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, WorkPolicy, channel, on
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.counters import Counters
from relay.consume.hindrances import Outages
from relay.consume.message import read_delivery
from relay.runtime.health import Health
from tests.consume.effects import QUEUE, Queue, Stumbling, Table, count, running
from tests.consume.policies import ORDERS, QUICK, SEVERAL_MINUTES, SOON, TWICE
from tests.support.eventually import eventually

EXCHANGE = "événements|eu"


@contextmanager
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the library send what it is told."""
    with monkeypatch.context() as patch:
        for kind in (Basic.Publish, Basic.Properties, Exchange.Declare, QueueMethods.Bind):
            patch.setattr(kind, "validate", lambda _: None)
        yield


async def send_through(queue: Queue, exchange: str, body: bytes, *, routing_key: str = "k", **properties: Any) -> None:
    """Publish to a fanout exchange that leads to the queue, or to the default one; its own properties alone."""
    channel = await queue.channel.get_underlay_channel()
    if exchange:
        await channel.exchange_declare(exchange, exchange_type="fanout")
        await channel.queue_bind(queue.name, exchange, routing_key="")
    given = {"message_id": str(uuid4()), "message_type": "Counted", **properties}
    await channel.basic_publish(
        body, exchange=exchange, routing_key=routing_key, properties=Basic.Properties(**given), mandatory=True
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("said", "told"), [("a\0b", r"a\x00b"), ("\ud800", r"\ud800")], ids=["nul", "surrogate"])
async def test_an_exception_may_say_anything(
    said: str, told: str, order: dict[str, Any], queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    handler = Stumbling({1: 2}, ValueError(said))
    message_id = await queue.send(1, key="a")
    await queue.send(2, key="b")

    consumer = Consumer(
        queue.name,
        [handler.handle],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(retries=TWICE, **order),
        work=WorkPolicy(concurrency=1, backoff=QUICK),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "the next one is applied")
        await eventually(lambda: consumer.counters.dead_letters["exhausted"] == 1, "it is a dead letter")

    (letter,) = await queue.dead()
    assert (letter.message_id, letter.headers["x-exception-message"]) == (message_id, told)
    assert handler.calls[1] == 2
    assert await table.held_count() == 0
    assert await queue.drained()


@on("Typed")
async def take_numbers(message: Message[dict[str, int]], connection: psycopg.AsyncConnection) -> None:
    raise AssertionError(f"not called with {message.payload}")


@pytest.mark.parametrize("order", ORDERS)
async def test_a_name_in_a_payload_may_be_anything(
    order: dict[str, Any], queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(rb'{"x\u0000y": "one"}', event_type="Typed", key="a")
    await queue.send(2, key="b")

    consumer = Consumer(
        queue.name,
        [count, take_numbers],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(**order),
        work=WorkPolicy(concurrency=1),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "the next one is applied")
        await eventually(lambda: consumer.counters.dead_letters["invalid"] == 1, "it is a dead letter")

    (letter,) = await queue.dead()
    assert str(letter.headers["x-exception-message"]).endswith(r"handler takes: x\x00y: int_parsing")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("exchange", "sent", "words"),
    [
        (
            "foreign",
            {"headers": {"x-aggregate-type": "c", "x-aggregate-id": "a\0b"}},
            r"its key 'c/a\x00b' holds a NUL",
        ),
        ("foreign", {"message_type": "Coun\0ted"}, r"its type 'Coun\x00ted' holds a NUL"),
        ("foreign", {"routing_key": "a\0b"}, r"its routing key 'a\x00b' holds a NUL"),
        ("", {"routing_key": QUEUE, "headers": {"x-original-exchange": "a\0b"}}, r"its exchange 'a\x00b' holds a NUL"),
    ],
    ids=["key", "type", "routing-key", "exchange"],
)
async def test_what_no_table_can_hold_is_a_dead_letter(
    exchange: str,
    sent: dict[str, Any],
    words: str,
    order: dict[str, Any],
    *,
    queue: Queue,
    table: Table,
    inbox: Inbox,
    broker: BrokerSettings,
) -> None:
    await send_through(queue, exchange, b"1", **sent)
    await queue.send(2, key="b")
    handler = Stumbling({1: 100})

    @on("*")
    async def all_others(message: Message, connection: psycopg.AsyncConnection) -> None: ...

    consumer = Consumer(
        queue.name,
        [handler.handle, all_others],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(**order),
        work=WorkPolicy(concurrency=1, backoff=QUICK),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "the next one is applied")
        await eventually(lambda: consumer.counters.dead_letters["invalid"] == 1, "it is a dead letter")

    (letter,) = await queue.dead()
    assert str(letter.headers["x-exception-message"]).startswith(words)
    assert await table.numbers() == [2]
    assert await queue.drained()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("exchange", "sent"),
    [(EXCHANGE, {}), ("e" * 200, {}), ("foreign", {"cluster_id": "eu"})],
    ids=["exchange", "long-exchange", "cluster-id"],
)
async def test_what_the_library_would_not_send_is_tried_again(
    exchange: str,
    sent: dict[str, Any],
    order: dict[str, Any],
    *,
    queue: Queue,
    table: Table,
    inbox: Inbox,
    broker: BrokerSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with unchecked(monkeypatch):
        await send_through(queue, exchange, b"1", headers={"x-aggregate-id": "a"}, **sent)
    handler = Stumbling({1: 1})

    consumer = Consumer(
        queue.name,
        [handler.handle],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(retries=SOON, **order),
        work=WorkPolicy(backoff=QUICK),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert handler.calls[1] == 2
    assert await table.numbers("a") == [1]
    assert await queue.drained()


@pytest.mark.parametrize("order", ORDERS)
async def test_a_delivery_that_cannot_be_read_is_a_dead_letter(
    order: dict[str, Any],
    queue: Queue,
    table: Table,
    inbox: Inbox,
    broker: BrokerSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it is that nobody has thought of: the library would lose the error, and we the message."""

    def read(delivered: DeliveredMessage, consumer_name: str, **_: bool) -> object:
        if delivered.body == b"1":
            raise ValueError("no such thing")
        return read_delivery(delivered, consumer_name)

    monkeypatch.setattr(channel, "read_delivery", read)
    await queue.send_all([1, 2])

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, failures=FailurePolicy(**order))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "the next one is applied")
        await eventually(lambda: consumer.counters.dead_letters["invalid"] == 1, "it is a dead letter")

    (letter,) = await queue.dead()
    assert letter.headers["x-exception-message"] == "it cannot be read: ValueError: no such thing"
    assert await queue.drained()


async def test_a_held_message_that_cannot_be_read_is_put_off_and_told(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    handler = Stumbling({1: 1})
    await queue.send(1, key="a")
    consumer = Consumer(
        queue.name, [handler.handle], inbox=inbox, broker=broker, failures=FailurePolicy(retries=SEVERAL_MINUTES)
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.held == 1, "it is held")
    await table.connection.execute("UPDATE outbox.held_message SET envelope = 'no header', due_at = now()")
    await queue.send(2, key="b")

    consumer = Consumer(
        queue.name, [Stumbling({2: 1}).handle], inbox=inbox, broker=broker, failures=FailurePolicy(retries=SOON)
    )
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 1, "another that was held is applied")

            def is_told() -> bool:
                return any("cannot be read" in event.get("error", "") for event in events)

            await eventually(is_told, "it is told")

    assert await table.numbers() == [2]
    cursor = await table.connection.execute("SELECT attempts, begun, due_at > now(), error FROM outbox.held_message")
    ((attempts, begun, is_put_off, words),) = await cursor.fetchall()
    assert (attempts, begun, is_put_off) == (1, 0, True)
    assert words.startswith("it cannot be read: ")


async def test_a_value_that_the_database_cannot_hold_is_no_outage(inbox: Inbox) -> None:
    session = InboxSession(inbox, Outages(QUICK, Counters(), Health()))
    try:
        with pytest.raises(psycopg.DataError):
            await session.run(SQL("SELECT %(text)s::text").format(), {"text": "a\0b"})
        assert await session.run(SQL("SELECT 1").format()) == [(1,)]
    finally:
        await session.close()
