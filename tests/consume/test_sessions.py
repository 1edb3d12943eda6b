"""What speaks of the database's session, or of another transaction, costs a message no attempt."""

import asyncio
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Retries, WorkPolicy, on
from relay.consume.apply import transactions
from tests.consume.effects import CONSUMER, MakeConsumer, Queue, Table, count, running
from tests.consume.policies import ORDERS, SOON, TWICE
from tests.consume.sqlalchemy_handlers import HANDLERS, KINDS
from tests.support.eventually import eventually

SESSIONS = 8
EIGHT = WorkPolicy(concurrency=SESSIONS)
ONCE = Retries(attempts=1)
READ = "SELECT * FROM rate"


@pytest.fixture
async def rates(table: Table) -> Table:
    await table.connection.execute("CREATE TABLE rate (percent integer NOT NULL)")
    await table.connection.execute("INSERT INTO rate VALUES (19)")
    return table


async def alter(table: Table) -> None:
    """Do as a deployment does: every plan of `READ` that a session has is stale now."""
    await table.connection.execute("ALTER TABLE rate ADD COLUMN since date")


class Warming:
    """Let the first messages go on together, so that each session has run the statement."""

    def __init__(self, sessions: int) -> None:
        self.met = asyncio.Barrier(sessions)
        self.is_warm = False

    async def meet(self) -> None:
        if not self.is_warm:
            await self.met.wait()
            self.is_warm = True


def reading(warming: Warming) -> Any:
    @on("Counted")
    async def read(message: Message, connection: psycopg.AsyncConnection) -> None:
        await connection.execute(READ, prepare=True)
        await warming.meet()
        await count(message, connection)

    return read


@pytest.mark.parametrize("failures", ORDERS)
async def test_a_table_that_is_altered_makes_no_dead_letter_of_warm_sessions(
    failures: dict[str, Any], queue: Queue, rates: Table, make_consumer: MakeConsumer
) -> None:
    for number in range(SESSIONS):
        await queue.send(number, key=f"key-{number}")

    consumer = make_consumer(reading(Warming(SESSIONS)), retries=SOON, work=EIGHT, **failures)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == SESSIONS, "every session is warm")
        await alter(rates)
        await queue.send(99)
        await eventually(lambda: consumer.counters.applied == SESSIONS + 1, "it is applied")

    assert consumer.counters.failed == 0
    assert consumer.counters.dead_letters.total() == 0
    assert consumer.counters.repeated >= 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_table_that_is_altered_makes_no_dead_letter_of_an_engines_sessions(
    kind: str, queue: Queue, rates: Table, targets: dict[str, Any], *, broker: BrokerSettings
) -> None:
    consumer = Consumer(
        queue.name,
        [reading_with_sqlalchemy(kind)],
        inbox=Inbox(targets[kind], CONSUMER),
        broker=broker,
        failures=FailurePolicy(order="skip", retries=ONCE),
        work=WorkPolicy(concurrency=1),
    )
    async with running(consumer):
        await queue.send(1)
        await eventually(lambda: consumer.counters.applied == 1, "the session is warm")
        await alter(rates)
        await queue.send(2)
        await eventually(lambda: consumer.counters.applied == 2, "it is applied")

    assert (consumer.counters.failed, consumer.counters.repeated) == (0, 1)


@pytest.fixture
async def targets(targets: dict[str, Any]) -> dict[str, Any]:
    """Every statement is prepared at once, as after five of them by default."""
    for each in (targets["connection"], targets["async connection"].sync_engine):
        sa.event.listen(each, "connect", prepare_at_once)
    return targets


def prepare_at_once(connection: Any, _record: object) -> None:
    getattr(connection, "driver_connection", connection).prepare_threshold = 0  # the async dialect wraps it


def reading_with_sqlalchemy(kind: str) -> Any:
    work = HANDLERS[kind]

    @on("Counted")
    def read(message: Message, given: Any) -> None:
        given.execute(sa.text(READ))
        work(message, given)

    @on("Counted")
    async def read_async(message: Message, given: Any) -> None:
        await given.execute(sa.text(READ))
        await work(message, given)

    return read_async if kind.startswith("async") else read


class Raising:
    """A handler in which the server raises an SQLSTATE, the first times that it is called."""

    def __init__(self, code: str, times: int) -> None:
        self.calls = 0

        @on("Counted")
        async def handle(message: Message, connection: psycopg.AsyncConnection) -> None:
            self.calls += 1
            await count(message, connection)
            if self.calls <= times:
                await connection.execute(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$")

        self.handle = handle


@pytest.mark.parametrize("failures", ORDERS)
@pytest.mark.parametrize("code", ["26000", "42P05", "40001", "40P01", "55P03"])
async def test_a_stale_session_or_another_transaction_costs_no_attempt(
    code: str, failures: dict[str, Any], queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    handler = Raising(code, times=3)
    await queue.send(1)

    consumer = make_consumer(handler.handle, retries=ONCE, **failures)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")

    assert (consumer.counters.failed, consumer.counters.repeated, handler.calls) == (0, 3, 4)
    assert await table.numbers() == [1]


async def test_a_conflict_that_does_not_end_counts_as_an_attempt_in_the_end(
    queue: Queue, table: Table, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "REPEAT_FOR", 0.1)
    await queue.send(1)

    consumer = make_consumer(Raising("40001", times=1_000_000).handle, retries=TWICE)
    async with running(consumer):
        await eventually(lambda: consumer.counters.dead_letters["exhausted"] == 1, "it is a dead letter")

    assert consumer.counters.failed == 2
    assert consumer.counters.repeated >= 2


async def test_a_consumer_stops_while_a_conflict_does_not_end(
    queue: Queue, table: Table, make_consumer: MakeConsumer
) -> None:
    await queue.send(1)

    consumer = make_consumer(Raising("40001", times=1_000_000).handle, retries=ONCE)
    async with running(consumer):
        await eventually(lambda: consumer.counters.repeated >= 2, "it is tried again")

    async def is_back() -> bool:
        return await queue.ready_count() == 1

    await eventually(is_back, "the broker has it again: a queue notices the end of a channel a bit late")
    assert consumer.counters.failed == 0
