"""A stranger who may write to an exchange writes the headers of our copies, and is not believed."""

import json
from typing import Any

import psycopg
import pytest
from aiormq.abc import AbstractChannel
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, on
from relay.consume.failed.envelope import folded
from relay.operate.letters.document import document
from relay.operate.letters.read import show_letter
from tests.consume.effects import Queue, Table, running
from tests.consume.policies import ORDERS, SOON
from tests.dead_letters.changes import RETRY, change
from tests.dead_letters.conftest import audit, letters
from tests.dead_letters.letters import DEAD, Letters
from tests.support.eventually import eventually

__all__ = ["audit", "letters"]  # fixtures

ID, ANOTHER = "0190a8f0-1111-7222-8333-444455556666", "0190a8f0-1111-7222-8333-444455557777"
# Of a message that would be another one: of another id, type and time.
FORGED = Basic.Properties(message_id=ANOTHER, message_type="Forged", headers={"x-aggregate-id": "forged"})
INNER = ContentHeader(properties=FORGED).marshal()
HEADERS: dict[str, Any] = {
    "x-folded-header": len(INNER),
    "x-retry-attempts": 4,
    "x-original-exchange": "forged",
    "x-original-routing-key": "forged",
    "x-partition": 3,
    "x-partition-epoch": 9,
    "mine": 1,
}
# RabbitMQ 3 only counts up a death that is there already, and keeps what it says.
DEATHS = [
    {"queue": queue, "reason": reason, "exchange": "", "routing-keys": [queue], "count": 1}
    for queue, reason in (("billing.retry.100", "expired"), ("waiting", "expired"), ("billing", "rejected"))
]
WAYS = ["exchange", "death"]


async def publish(channel: AbstractChannel, way: str, queue: str, headers: dict[str, Any]) -> None:
    """Publish to a fanout exchange. It leads to the queue at once, or by a queue of the stranger's where it dies."""
    target = queue
    if way == "death":
        target = "waiting"
        await channel.queue_declare(
            target,
            durable=True,
            arguments={"x-message-ttl": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue},
        )
        headers = {**headers, "x-death": DEATHS}
    await channel.exchange_declare("strangers", exchange_type="fanout")
    await channel.queue_bind(target, "strangers")
    properties = Basic.Properties(message_id=ID, message_type="Counted", headers=headers)
    await channel.basic_publish(INNER + b"body", exchange="strangers", routing_key="key", properties=properties)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS)
async def test_a_message_of_a_stranger_is_handled_as_it_came(
    way: str, order: dict[str, Any], queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    seen: list[Message] = []

    @on("*")
    async def take(message: Message, connection: psycopg.AsyncConnection) -> None:
        seen.append(message)
        if len(seen) == 1:
            raise RuntimeError("try again")

    await publish(await queue.channel.get_underlay_channel(), way, queue.name, HEADERS)
    policy = FailurePolicy(retries=SOON, **order)
    consumer = Consumer(queue.name, [take], inbox=inbox, broker=broker, failures=policy)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied at the second try")

    for message in seen:
        assert (str(message.message_id), message.type, message.body) == (ID, "Counted", INNER + b"body")
        assert message.routing_key == {"exchange": "key", "death": queue.name}[way]
        assert message.headers["mine"] == 1
        assert not {"x-folded-header", "x-partition"} & message.headers.keys()


@pytest.mark.parametrize("way", WAYS)
async def test_a_dead_letter_of_a_stranger_is_shown_and_sent_back_as_it_came(
    way: str, letters: Letters, audit: psycopg.Connection[dict[str, Any]], broker: BrokerSettings
) -> None:
    """Such as a message that was returned too often, where a policy of the broker makes dead letters."""
    failure = {"x-dead-reason": "exhausted", "x-dead-attempts": 7, "x-consumer": "forged", "x-exception": "Forged"}
    await publish(letters.channel, way, DEAD, {**HEADERS, **failure})
    await eventually(lambda: letters.has(1), "it is there")

    held = await show_letter(broker, DEAD, ID)
    done = await change(letters, RETRY, audit)

    letter = held.letter
    assert (letter.type, letter.aggregate_id, held.delivered.body) == ("Counted", None, INNER + b"body")
    assert (letter.attempts, letter.consumer, letter.exception) == (None, None, None)
    assert letter.reason == {"exchange": None, "death": "expired"}[way]
    assert "forged" not in json.dumps(document(held)["headers"]).lower()
    assert (done.done, done.refused) == (1, [])
    (back,) = await letters.consumed()
    assert (back.message_id, back.type, back.body) == (ID, "Counted", INNER + b"body")
    assert not {"x-folded-header", "x-partition"} & back.headers.keys()


async def test_a_folded_letter_that_the_broker_made_of_a_copy_is_unfolded(
    letters: Letters, audit: psycopg.Connection[dict[str, Any]], broker: BrokerSettings
) -> None:
    """A copy that came back too often dies in the consumed queue, which it had reached by the default exchange."""
    consumed = letters.queue.name
    await letters.queue.channel.queue_delete(consumed)
    await letters.queue.declare(**{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD})
    inner = Basic.Properties(message_id=ID, message_type="Counted", headers={"x-aggregate-id": "17"})
    properties, body = folded(inner, b"body", frame_max=64)
    await letters.channel.basic_publish(body, routing_key=consumed, properties=properties)
    came = await letters.channel.basic_get(consumed)
    await letters.channel.basic_reject(came.delivery_tag or 0, requeue=False)
    await eventually(lambda: letters.has(1), "it is dead")

    held = await show_letter(broker, DEAD, ID)

    assert (held.letter.type, held.letter.aggregate_id, held.delivered.body) == ("Counted", "17", b"body")
    assert held.letter.reason == "rejected"
