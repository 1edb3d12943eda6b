"""Whatever an AMQP client puts into a message: its neighbours are applied, it is a dead letter, no connection ends."""

import base64
import random
from typing import Any
from uuid import uuid4

import pytest

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, WorkPolicy
from relay.operate.letters.document import document
from relay.operate.letters.read import show_letter
from tests.consume.effects import Queue, Stumbling, Table, count, running
from tests.consume.policies import ORDERS, QUICK, TWICE
from tests.support.eventually import eventually
from tests.support.raw_client import FRAME_SIZE, RawClient, entry, long, properties
from tests.support.undecodable import UNDECODABLE

HEADER_START = 12  # bytes before the properties
FAILS, DIES = str(uuid4()), str(uuid4())


async def test_what_cannot_be_decoded_is_a_dead_letter_with_its_frame(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, client: RawClient
) -> None:
    exchange = await queue.channel.declare_exchange("foreign", "fanout")
    await (await queue.channel.get_queue(queue.name)).bind(exchange)
    raw = []
    for number, sent in enumerate(UNDECODABLE.values()):
        given = {"message_id": str(uuid4()).encode(), "message_type": b"Counted", **sent}
        routing_key = given.pop("routing_key", b"k")
        raw.append(properties(**given))
        assert await client.publish(raw[-1], b"%d" % number, exchange=b"foreign", routing_key=routing_key)
        await queue.send(number)

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK))
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == len(raw), "the others are applied")
        await eventually(lambda: consumer.counters.dead_letters["invalid"] == len(raw), "they are dead letters")

    assert consumer.counters.broker_losses.total() == 0
    assert await table.numbers() == list(range(len(raw)))
    letters = await queue.dead()
    assert sorted(int(letter.body) for letter in letters) == list(range(len(raw)))
    for letter in letters:
        assert base64.b64decode(str(letter.headers["x-raw-header"])).endswith(raw[int(letter.body)])
        assert str(letter.headers["x-exception-message"]).startswith("it cannot be decoded: ")
    assert await queue.drained()


def filled(given: dict[str, Any], headers: bytes) -> bytes:
    """Encode properties that fill a header frame to its last byte."""
    empty = len(properties(headers=headers + entry(b"fill", b"S" + long(b"")), **given))
    fill = b"x" * (FRAME_SIZE - HEADER_START - empty)
    return properties(headers=headers + entry(b"fill", b"S" + long(fill)), **given)


@pytest.mark.parametrize("order", ORDERS)
async def test_a_message_whose_headers_fill_a_frame_is_tried_again_and_a_dead_letter(
    order: dict[str, Any], queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, client: RawClient
) -> None:
    """A copy has more headers than the message, and the broker ends the connection over a larger frame."""
    headers = entry(b"x-aggregate-id", b"S" + long(b"large"))
    for message_id in (FAILS, DIES):
        given = {"message_id": message_id.encode(), "message_type": b"Counted"}
        assert await client.publish(filled(given, headers), b"1" if message_id == FAILS else b"2")
    handler = Stumbling({1: 1, 2: 100})

    consumer = Consumer(
        queue.name,
        [handler.handle],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(retries=TWICE, **order),
        work=WorkPolicy(backoff=QUICK),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "one is applied")
        await eventually(lambda: consumer.counters.dead_letters["exhausted"] == 1, "the other is a dead letter")

    assert await table.numbers("large") == [1]
    assert handler.calls == {1: 2, 2: 2}
    held = await show_letter(broker, f"{queue.name}.dead", DIES)
    assert held.delivered.body == b"2"
    assert held.letter.reason == "exhausted"
    assert (held.letter.key, held.letter.type, held.letter.attempts) == ("None/large", "Counted", 2)
    assert len(document(held)["headers"]["fill"]) > 130_000
    assert await queue.drained()


async def test_a_key_that_no_index_can_hold_is_a_dead_letter(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, client: RawClient
) -> None:
    """The outbox takes 255 bytes. PostgreSQL refuses the held row, which would be tried without end."""
    key = entry(b"x-aggregate-id", b"S" + long(random.Random(1).randbytes(4000).hex().encode()))
    given: dict[str, Any] = {"message_id": str(uuid4()).encode(), "message_type": b"Counted", "headers": key}
    assert await client.publish(properties(**given), b"1")
    await queue.send(2)
    handler = Stumbling({1: 100})

    consumer = Consumer(
        queue.name,
        [handler.handle],
        inbox=inbox,
        broker=broker,
        failures=FailurePolicy(retries=TWICE),
        work=WorkPolicy(backoff=QUICK),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "the next one is applied")
        await eventually(lambda: consumer.counters.dead_letters["invalid"] == 1, "it is a dead letter")

    assert await table.held_count() == 0
