"""What a consumer does not find at its start ends it with words that name the thing and the remedy."""

import asyncio

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs
from yarl import URL

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, FailurePolicy, Inbox, WorkPolicy
from relay.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    DatabaseUnavailableError,
    QueueMissingError,
    SchemaError,
)
from relay.testing.servers.process import free_port
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import MakeConsumer, Queue, Table, count, count_together, running
from tests.support.eventually import eventually
from tests.support.proxied import with_port


def test_an_order_that_is_none_is_refused(inbox: Inbox) -> None:
    with pytest.raises(ConfigurationError, match="order is 'hold' or 'skip', not 'strict'"):
        Consumer("q", [count], inbox=inbox, broker=BrokerSettings(), failures=FailurePolicy(order="strict"))  # type: ignore[arg-type]


async def test_a_missing_queue_is_told_at_the_start(inbox: Inbox, broker: BrokerSettings) -> None:
    consumer = Consumer("nowhere", [count], inbox=inbox, broker=broker)

    with pytest.raises(QueueMissingError, match=r"queue 'nowhere' does not exist.*`relay topology apply`"):
        await asyncio.wait_for(consumer.run(signals=False), 20)


async def test_a_stream_is_refused_at_the_start(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> None:
    queue.name = "stream"
    await queue.declare("stream")

    with pytest.raises(ConfigurationError, match=r"queue 'stream' is a stream.*Consume a quorum or classic queue"):
        await asyncio.wait_for(Consumer(queue.name, [count], inbox=inbox, broker=broker).run(signals=False), 60)


async def test_a_queue_that_the_user_may_not_read_is_told_at_the_start(
    queue: Queue, inbox: Inbox, broker: BrokerSettings, rabbitmq: RabbitServer
) -> None:
    url = URL(broker.url.get_secret_value())
    rabbitmq.ctl("set_permissions", "-p", url.path[1:], str(url.user), ".*", ".*", "^$")

    with pytest.raises(ConfigurationError, match=r"queue 'billing' cannot be consumed: .* Give the user of"):
        await asyncio.wait_for(Consumer(queue.name, [count], inbox=inbox, broker=broker).run(signals=False), 60)


async def test_a_missing_inbox_is_told_at_the_start(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> None:
    elsewhere = Inbox(inbox.database.model_copy(update={"schema_name": "elsewhere"}), "projection")
    consumer = Consumer(queue.name, [count], inbox=elsewhere, broker=broker)

    with pytest.raises(SchemaError, match=r"elsewhere\.processed_message is missing"):
        await consumer.run(signals=False)


async def test_missing_tables_of_the_consumer_are_told_at_the_start(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await table.connection.execute("DROP TABLE outbox.held_message")
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)

    with pytest.raises(SchemaError, match=r"outbox\.held_message is missing .* lacks DELETE, INSERT, SELECT, UPDATE"):
        await consumer.run(signals=False)


async def test_servers_that_are_not_there_are_told_at_the_start(
    queue: Queue, inbox: Inbox, broker: BrokerSettings
) -> None:
    nobody = free_port()
    no_database = DatabaseSettings(url=SecretStr(f"postgresql://u:secret@127.0.0.1:{nobody}/d"))

    with pytest.raises(DatabaseUnavailableError, match="refused"):
        await Consumer(queue.name, [count], inbox=Inbox(no_database, "c"), broker=broker).run(signals=False)
    with pytest.raises(BrokerUnavailableError, match=str(nobody)):
        await Consumer(queue.name, [count], inbox=inbox, broker=with_port(broker, nobody)).run(signals=False)


@pytest.mark.parametrize(("batch_size", "told"), [(1, [["count_together"]]), (2, [])])
async def test_a_handler_of_batches_that_gets_single_messages_is_told(
    batch_size: int, told: list[list[str]], *, queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    consumer = make_consumer(count_together, work=WorkPolicy(batch_size=batch_size))
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: not consumer.hindrances(), "it is ready")

    assert [event["handlers"] for event in events if event["event"] == "consumer.batches_of_one"] == told
