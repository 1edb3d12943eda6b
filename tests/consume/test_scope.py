"""An inbox by message, or by writer: whether a second writer's message of the same id is applied."""

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.sql import SQL

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, WorkPolicy, on
from relay.consume.apply.inbox import ID_OF_WRITER
from relay.errors import ConfigurationError
from relay.outbox.identity import id_of_writer
from tests.consume.effects import Queue, Stumbling, Table, count, running
from tests.consume.policies import ORDERS, QUICK, SEVERAL_MINUTES, SOON
from tests.support.eventually import eventually


async def send(queue: Queue, number: int, writer: str | None, message_id: str, *, key: str = "a") -> None:
    """Send a message as the relay does for a row of this role."""
    headers = {} if writer is None else {"x-outbox-writer": writer}
    await queue.send(number, key=key, message_id=message_id, headers=headers)


@pytest.fixture
def by_writer(inbox: Inbox) -> Inbox:
    return replace(inbox, scope="writer")


@pytest.mark.parametrize("batch_size", [1, 10])
async def test_each_writer_s_message_of_one_id_is_applied_once(
    batch_size: int, queue: Queue, table: Table, by_writer: Inbox, broker: BrokerSettings
) -> None:
    message_id = str(uuid4())
    for _ in range(2):
        await send(queue, 1, "attacker", message_id)
        await send(queue, 2, "victim", message_id)
    keys: dict[int, str] = {}

    @on("*")
    async def take(message: Message, connection: psycopg.AsyncConnection) -> None:
        keys[message.json()] = message.idempotency_key
        assert (message.message_id, message.writer) == (UUID(message_id), {1: "attacker", 2: "victim"}[message.json()])
        await count(message, connection)

    work = WorkPolicy(concurrency=1, batch_size=batch_size)
    consumer = Consumer(queue.name, [take], inbox=by_writer, broker=broker, work=work)
    async with running(consumer):
        await eventually(lambda: consumer.counters.duplicates == 2, "the repeats are known")

    assert sorted(await table.numbers()) == [1, 2]
    assert keys[1] != keys[2]
    assert await queue.drained()


async def test_by_message_a_second_writer_s_message_of_one_id_is_a_repeat(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    message_id = str(uuid4())
    await send(queue, 1, "attacker", message_id)
    await send(queue, 2, "victim", message_id)

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with running(consumer):
        await eventually(lambda: consumer.counters.duplicates == 1, "it is taken for a repeat")

    assert await table.numbers() == [1]


async def test_what_was_applied_by_message_is_not_applied_again_by_writer(
    queue: Queue, table: Table, inbox: Inbox, by_writer: Inbox, broker: BrokerSettings
) -> None:
    ids = [str(uuid4()) for _ in range(2)]
    await send(queue, 1, "billing", ids[0])
    await send(queue, 2, None, ids[1])  # of a row from before migration 0021
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 2, "both are applied")

    for writer, message_id in (("billing", ids[0]), (None, ids[1])):
        await send(queue, 3, writer, message_id)
    await send(queue, 4, "billing", str(uuid4()))
    consumer = Consumer(queue.name, [count], inbox=by_writer, broker=broker)
    async with running(consumer):
        await eventually(lambda: (consumer.counters.applied, consumer.counters.duplicates) == (1, 2), "a new one")

    assert await table.numbers() == [1, 2, 4]


@pytest.mark.parametrize("order", ORDERS)
async def test_each_writer_s_failed_message_is_tried_again(
    order: dict[str, Any], queue: Queue, table: Table, by_writer: Inbox, broker: BrokerSettings
) -> None:
    """A held message of the same id would take in the other one, which then would be acknowledged and gone."""
    message_id = str(uuid4())
    await send(queue, 1, "attacker", message_id)
    await send(queue, 2, "victim", message_id)
    handler = Stumbling({1: 1, 2: 1})
    policy = FailurePolicy(retries=SOON, **order)

    consumer = Consumer(
        queue.name, [handler.handle], inbox=by_writer, broker=broker, failures=policy, work=WorkPolicy(backoff=QUICK)
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 2, "both are applied")

    assert sorted(await table.numbers()) == [1, 2]
    assert handler.calls == {1: 2, 2: 2}
    assert await table.held_count() == 0
    assert await queue.drained()


async def test_a_writer_s_failed_message_does_not_hold_up_another_writer_s_key(
    queue: Queue, table: Table, by_writer: Inbox, broker: BrokerSettings
) -> None:
    handler = Stumbling({1: 100})
    await send(queue, 1, "attacker", str(uuid4()))
    await send(queue, 2, "attacker", str(uuid4()))
    await send(queue, 3, "victim", str(uuid4()))

    consumer = Consumer(
        queue.name, [handler.handle], inbox=by_writer, broker=broker, failures=FailurePolicy(retries=SEVERAL_MINUTES)
    )
    async with running(consumer):
        await eventually(lambda: (consumer.counters.applied, consumer.counters.held) == (1, 2), "the victim's")

    assert await table.numbers() == [3]


async def test_what_was_held_by_message_is_applied_once_by_writer(
    queue: Queue, table: Table, inbox: Inbox, by_writer: Inbox, broker: BrokerSettings
) -> None:
    ids = [str(uuid4()) for _ in range(2)]
    for number, message_id in enumerate(ids, start=1):
        await send(queue, number, "billing", message_id)
    policy = FailurePolicy(retries=SEVERAL_MINUTES)
    consumer = Consumer(queue.name, [Stumbling({1: 1}).handle], inbox=inbox, broker=broker, failures=policy)
    async with running(consumer):
        await eventually(lambda: consumer.counters.held == 2, "one is held behind the other")
    await table.connection.execute("UPDATE outbox.held_message SET due_at = now() WHERE due_at < 'infinity'")

    consumer = Consumer(queue.name, [count], inbox=by_writer, broker=broker)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 2, "both are applied")
        for message_id in ids:
            await send(queue, 9, "billing", message_id)
        await eventually(lambda: consumer.counters.duplicates == 2, "they are known")

    assert await table.numbers() == [1, 2]
    assert await table.held_count() == 0


@pytest.mark.parametrize("writer", ["billing", "", "büro 😀", "r" * 63])
def test_postgres_knows_a_writer_s_message_by_the_same_id(database_url: str, writer: str) -> None:
    message_id = uuid4()
    statement = SQL("SELECT {} FROM (VALUES (%s::uuid, %s::text)) AS row (message_id, written_as)")
    with psycopg.connect(database_url) as connection:
        found = connection.execute(statement.format(SQL(ID_OF_WRITER)), [message_id, writer]).fetchone()

    assert found == (id_of_writer(message_id, writer),)


def test_an_inbox_without_a_consumers_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="an inbox needs the name of its consumer"):
        Inbox("postgresql://nobody@127.0.0.1/nowhere", "")


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one of message, writer"):
        Inbox("postgresql://localhost/shop", "billing", scope="role")  # type: ignore[arg-type]
