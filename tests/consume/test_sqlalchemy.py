"""Handlers that work with SQLAlchemy: their work and the inbox row are one transaction, in each of four kinds."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.consume.apply.handlers import collect_handlers
from relay.consume.apply.transactions import Transactions
from relay.consume.apply.transactions_factory import open_transactions
from relay.consume.message import Delivery
from relay.consume.pool import PartitionedConsumer
from relay.errors import ConfigurationError, DatabaseUnavailableError, InboxUnavailableError
from relay.testing.servers.process import free_port
from tests.consume.effects import CONSUMER, Queue, Table, delivered, running
from tests.consume.policies import QUICK
from tests.consume.sqlalchemy_handlers import (
    HANDLERS,
    KINDS,
    Effect,
    by_async_connection,
    by_async_session,
    by_connection,
    effect,
    engine_url,
)
from tests.support.eventually import eventually


@asynccontextmanager
async def opened(target: Any, handler: Any) -> AsyncIterator[Transactions]:
    transactions = open_transactions(Inbox(target, CONSUMER), collect_handlers([handler]))
    await transactions.open()
    try:
        yield transactions
    finally:
        await transactions.close()


def deliveries(*numbers: int) -> list[Delivery]:
    return [delivered(number) for number in numbers]


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("kind", KINDS)
async def test_each_message_takes_effect_once(
    kind: str, batch_size: int, queue: Queue, table: Table, targets: dict[str, Any], *, broker: BrokerSettings
) -> None:
    message_id = await queue.send(0)
    await queue.send(0, message_id=message_id)
    await queue.send_all(range(1, 20))

    consumer = Consumer(
        queue.name,
        [HANDLERS[kind]],
        inbox=Inbox(targets[kind], CONSUMER),
        broker=broker,
        work=WorkPolicy(batch_size=batch_size),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied + consumer.counters.duplicates == 21, "all are settled")

    assert await table.numbers() == list(range(20))
    assert (consumer.counters.duplicates, consumer.counters.failed) == (1, 0)
    assert await table.inbox_count() == 20


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_that_fails_leaves_neither_its_work_nor_an_inbox_row(
    kind: str, table: Table, targets: dict[str, Any]
) -> None:
    await table.connection.execute("ALTER TABLE effect ADD CONSTRAINT small CHECK (number < 10)")

    async with opened(targets[kind], HANDLERS[kind]) as transactions:
        with pytest.raises(IntegrityError, match="small"):
            await transactions.apply(deliveries(1, 2, 10))
        assert (await table.inbox_count(), await table.numbers()) == (0, [])
        assert (await transactions.apply(deliveries(1, 2))).count == 2

    assert (await table.inbox_count(), await table.numbers()) == (2, [1, 2])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lost_connection_is_not_the_handlers_fault_and_is_opened_again(
    kind: str, queue: Queue, table: Table, targets: dict[str, Any], broker: BrokerSettings
) -> None:
    inbox = Inbox(targets[kind], CONSUMER)
    consumer = Consumer(
        queue.name, [HANDLERS[kind]], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=1, backoff=QUICK)
    )
    with capture_logs() as events:
        async with running(consumer):
            for number in range(4):
                await queue.send(number)
                await eventually(lambda: consumer.counters.applied == number + 1, "it is applied")  # noqa: B023
                await table.end_sessions()

    assert await table.numbers() == [0, 1, 2, 3]
    assert consumer.counters.failed == 0
    assert "database.degraded" in [event["event"] for event in events]


@on("Counted")
def commit_connection(message: Message, connection: sa.Connection) -> None:
    by_connection(message, connection)
    connection.commit()


@on("Counted")
def roll_connection_back(message: Message, connection: sa.Connection) -> None:
    by_connection(message, connection)
    connection.rollback()


@on("Counted")
async def commit_async_connection(message: Message, connection: AsyncConnection) -> None:
    await by_async_connection(message, connection)
    await connection.commit()


@on("Counted")
async def commit_below_the_session(message: Message, session: AsyncSession) -> None:
    await (await session.connection()).commit()


@pytest.mark.parametrize(
    ("kind", "handler", "words"),
    [
        ("connection", commit_connection, r"Explicit commit\(\) forbidden"),
        ("connection", roll_connection_back, r"Explicit rollback\(\) forbidden"),
        ("async connection", commit_async_connection, r"Explicit commit\(\) forbidden"),
        ("async session", commit_below_the_session, r"Explicit commit\(\) forbidden"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_handler_cannot_end_the_transaction(
    kind: str, handler: Any, words: str, *, table: Table, targets: dict[str, Any]
) -> None:
    async with opened(targets[kind], handler) as transactions:
        for _ in range(2):
            with pytest.raises(ProgrammingError, match=words):
                await transactions.apply(deliveries(1, 2))

    assert (await table.inbox_count(), await table.numbers()) == (0, [])


@on("Counted")
def savepoint_of_connection(message: Message, connection: sa.Connection) -> None:
    with connection.begin_nested():
        by_connection(message, connection)


@on("Counted")
async def commits_session(message: Message, session: AsyncSession) -> None:
    await by_async_session(message, session)
    await session.commit()
    if message.json() == 3:
        raise ValueError("three")


@on("Counted")
def forgives_a_failed_flush(message: Message, session: Session) -> None:
    session.add(Effect(**effect(message)))
    try:
        session.flush()
    except IntegrityError:
        session.rollback()


async def test_a_savepoint_is_fine(table: Table, targets: dict[str, Any]) -> None:
    async with opened(targets["connection"], savepoint_of_connection) as transactions:
        await transactions.apply(deliveries(1, 2))

    assert await table.numbers() == [1, 2]


async def test_a_sessions_commit_commits_nothing_before_the_inbox_row(table: Table, targets: dict[str, Any]) -> None:
    async with opened(targets["async session"], commits_session) as transactions:
        await transactions.apply(deliveries(1, 2))
        with pytest.raises(ValueError, match="three"):
            await transactions.apply(deliveries(4, 3))

    assert (await table.inbox_count(), await table.numbers()) == (2, [1, 2])


async def test_a_sessions_rollback_takes_back_the_work_of_its_message_alone(
    table: Table, targets: dict[str, Any]
) -> None:
    await table.connection.execute("ALTER TABLE effect ADD CONSTRAINT small CHECK (number < 10)")

    async with opened(targets["session"], forgives_a_failed_flush) as transactions:
        assert (await transactions.apply(deliveries(1, 10, 2))).count == 3

    assert (await table.inbox_count(), await table.numbers()) == (3, [1, 2])


async def test_an_engine_in_autocommit_mode_has_transactions_all_the_same(
    table: Table, database: DatabaseSettings
) -> None:
    engine = sa.create_engine(engine_url(database.url.get_secret_value()), isolation_level="AUTOCOMMIT")
    await table.connection.execute("ALTER TABLE effect ADD CONSTRAINT small CHECK (number < 10)")

    async with opened(engine, by_connection) as transactions:
        with pytest.raises(IntegrityError):
            await transactions.apply(deliveries(1, 10))
    engine.dispose()

    assert (await table.inbox_count(), await table.numbers()) == (0, [])


async def test_another_schema_is_named_by_the_inbox(targets: dict[str, Any]) -> None:
    inbox = Inbox(targets["async connection"], CONSUMER, schema_name="elsewhere")
    transactions = open_transactions(inbox, collect_handlers([by_async_connection]))
    await transactions.open()

    with pytest.raises(InboxUnavailableError, match=r"elsewhere\.processed_message"):
        await transactions.apply(deliveries(1))
    await transactions.close()


@pytest.mark.parametrize("kind", ["connection", "async connection"])
async def test_a_database_that_is_not_there_is_told(kind: str) -> None:
    url = f"postgresql+psycopg://u:secret@127.0.0.1:{free_port()}/d"
    engine: Any = sa.create_engine(url) if kind == "connection" else create_async_engine(url)
    transactions = open_transactions(Inbox(engine, CONSUMER), collect_handlers([HANDLERS[kind]]))

    with pytest.raises(DatabaseUnavailableError, match="refused") as raised:
        await transactions.open()

    assert transactions.is_lost
    assert "secret" not in str(raised.value)


@pytest.fixture
def no_server() -> Iterator[sa.Engine]:
    engine = sa.create_engine("postgresql+psycopg://u@127.0.0.1/d")
    yield engine
    engine.dispose()


def test_handlers_of_the_other_kind_are_refused(no_server: sa.Engine) -> None:
    async_engine = create_async_engine("postgresql+psycopg://u@127.0.0.1/d")
    settings = BrokerSettings()

    with pytest.raises(ConfigurationError, match="an inbox with Engine takes plain functions"):
        Consumer("q", [by_async_connection], inbox=Inbox(no_server, "c"), broker=settings)
    with pytest.raises(ConfigurationError, match="an inbox with AsyncEngine takes `async def` handlers"):
        Consumer("q", [by_connection], inbox=Inbox(async_engine, "c"), broker=settings)
    with pytest.raises(ConfigurationError, match="pipeline is psycopg's"):
        Consumer(
            "q", [by_async_connection], inbox=Inbox(async_engine, "c"), broker=settings, work=WorkPolicy(pipeline=True)
        )


def test_a_pool_with_too_few_connections_is_refused() -> None:
    small = Inbox(sa.create_engine("postgresql+psycopg://u@127.0.0.1/d", pool_size=5, max_overflow=1), "c")
    endless = Inbox(sa.create_engine("postgresql+psycopg://u@127.0.0.1/d", max_overflow=-1), "c")

    with pytest.raises(
        ConfigurationError, match=r"has 6 connections at most and this consumer needs 7: .* pool_size=7"
    ):
        Consumer("q", [by_connection], inbox=small, broker=BrokerSettings())
    with pytest.raises(ConfigurationError, match="needs 35"):
        PartitionedConsumer("q", [by_connection], inbox=small, broker=BrokerSettings())

    Consumer("q", [by_connection], inbox=small, broker=BrokerSettings(), work=WorkPolicy(concurrency=3))
    Consumer("q", [by_connection], inbox=endless, broker=BrokerSettings(), work=WorkPolicy(concurrency=100))


def test_what_has_no_transaction_of_psycopg_is_refused(no_server: sa.Engine) -> None:
    other = sa.create_engine("sqlite://")

    with pytest.raises(ConfigurationError, match=r"postgresql\+psycopg, not of sqlite\+pysqlite"):
        Inbox(other, "c")
    with pytest.raises(ConfigurationError, match="bound to one engine"):
        Inbox(sessionmaker(), "c")
    with pytest.raises(ConfigurationError, match="bound to one engine"):
        Inbox(sessionmaker(no_server, binds={Effect: other}), "c")
    with pytest.raises(ConfigurationError, match="a URL or DatabaseSettings, or with an engine or sessionmaker"):
        Inbox(other.url, "c")  # type: ignore[arg-type]


def test_who_does_without_sqlalchemy_does_not_load_it() -> None:
    code = "import relay.consume, sys; sys.exit('sqlalchemy' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
