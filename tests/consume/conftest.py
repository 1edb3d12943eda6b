"""The queue, the table and the inbox of one test."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aio_pika
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, FailurePolicy, Inbox, WorkPolicy
from relay.consume.apply.handlers import AsyncHandler, SyncHandler
from relay.servers.postgres.database import connect_async
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume import delivery_timeout
from tests.consume.effects import CONSUMER, EFFECTS, MakeConsumer, Queue, Table
from tests.consume.sqlalchemy_handlers import KINDS, engine_url
from tests.support.raw_client import RawClient


@pytest.fixture
async def queue(broker_url: str) -> AsyncIterator[Queue]:
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        queue = Queue(channel)
        await queue.declare()
        yield queue


@pytest.fixture
async def table(database: DatabaseSettings) -> AsyncIterator[Table]:
    async with await connect_async(database) as connection:
        await connection.execute(EFFECTS)
        yield Table(connection)


@pytest.fixture
def inbox(database: DatabaseSettings) -> Inbox:
    return Inbox(database, CONSUMER)


@pytest.fixture
def make_consumer(queue: Queue, inbox: Inbox, broker: BrokerSettings) -> MakeConsumer:
    def make(
        *handlers: AsyncHandler | SyncHandler,
        work: WorkPolicy = WorkPolicy(),  # noqa: B008 (immutable)
        **failures: Any,
    ) -> Consumer:
        policy = FailurePolicy(**failures)
        return Consumer(queue.name, handlers, inbox=inbox, broker=broker, failures=policy, work=work)

    return make


@pytest.fixture
async def targets(database: DatabaseSettings) -> AsyncIterator[dict[str, Any]]:
    """What an inbox of each kind of SQLAlchemy is made with."""
    url = engine_url(database.url.get_secret_value())
    engine, async_engine = sa.create_engine(url), create_async_engine(url)
    yield dict(zip(KINDS, (engine, sessionmaker(engine), async_engine, async_sessionmaker(async_engine)), strict=True))
    engine.dispose()
    await async_engine.dispose()


@pytest.fixture
async def client(broker_url: str) -> AsyncIterator[RawClient]:
    """A client of the test's virtual host that publishes what no library sends."""
    raw = RawClient(broker_url)
    yield raw
    await raw.close()


@pytest.fixture
def short_timeout(rabbitmq: RabbitServer) -> Iterator[None]:
    """The broker takes back a delivery that is unacknowledged for `delivery_timeout.TIMEOUT`."""
    with delivery_timeout.short_timeout(rabbitmq):
        yield
