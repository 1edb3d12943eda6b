"""What fails in handlers that work with SQLAlchemy is classified by the driver's error, and held in the same tables."""

from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Retries, on
from tests.consume.effects import CONSUMER, Queue, Table, running
from tests.consume.policies import SOON
from tests.consume.sqlalchemy_handlers import HANDLERS, KINDS, Effect, effect
from tests.support.eventually import eventually

DIVIDE = sa.text("SELECT 1 / 0")


def stumbling(kind: str, *, over: int, failures: int) -> Any:
    """Return a handler that does its work and then fails in the database, so often."""
    left = [DIVIDE] * failures
    work = HANDLERS[kind]

    @on("Counted")
    def handle(message: Message, given: Any) -> None:
        work(message, given)
        if message.json() == over and left:
            given.execute(left.pop())

    @on("Counted")
    async def handle_async(message: Message, given: Any) -> None:
        await work(message, given)
        if message.json() == over and left:
            await given.execute(left.pop())

    return handle_async if kind.startswith("async") else handle


@pytest.mark.parametrize("kind", KINDS)
async def test_a_held_message_is_applied_before_its_followers(
    kind: str, queue: Queue, table: Table, targets: dict[str, Any], *, broker: BrokerSettings
) -> None:
    await queue.send_all(range(5))

    handler = stumbling(kind, over=1, failures=2)
    consumer = Consumer(
        queue.name, [handler], inbox=Inbox(targets[kind], CONSUMER), broker=broker, failures=FailurePolicy(retries=SOON)
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 5, "all are applied")

    assert consumer.counters.failed == 2
    assert await table.numbers() == list(range(5))
    assert (await table.inbox_count(), await table.held_count()) == (5, 0)


@pytest.mark.parametrize("kind", ["session", "async session"])
async def test_the_drivers_error_decides_what_a_failure_means(
    kind: str, queue: Queue, table: Table, targets: dict[str, Any], *, broker: BrokerSettings
) -> None:
    await queue.send_all(range(2))

    consumer = Consumer(
        queue.name,
        [stumbling(kind, over=0, failures=1)],
        inbox=Inbox(targets[kind], CONSUMER),
        broker=broker,
        failures=FailurePolicy(permanent_on=[psycopg.errors.DivisionByZero]),
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.dead_letters["permanent"] == 1, "it is a dead letter")
        await eventually(lambda: consumer.counters.applied == 1, "the other one is applied")

    (letter,) = await queue.dead()
    assert letter.headers["x-exception"] == "psycopg.errors.DivisionByZero"
    assert await table.numbers() == [1]


@on("Counted")
def add_and_ask(message: Message, session: Session) -> None:
    session.add(Effect(**effect(message)))
    session.execute(sa.text("SELECT 1"))  # a flush first
    session.scalars(sa.select(Effect)).all()


async def test_the_drivers_error_is_told_and_not_how_the_flush_came_about(
    queue: Queue, table: Table, targets: dict[str, Any], *, broker: BrokerSettings
) -> None:
    await table.connection.execute("ALTER TABLE effect ADD CONSTRAINT small CHECK (number < 10)")
    await queue.send(10)

    consumer = Consumer(
        queue.name,
        [add_and_ask],
        inbox=Inbox(targets["session"], CONSUMER),
        broker=broker,
        failures=FailurePolicy(retries=Retries(attempts=1)),
    )
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.dead_letters["exhausted"] == 1, "it is a dead letter")

    words = 'new row for relation "effect" violates check constraint "small"'
    (letter,) = await queue.dead()
    assert (letter.headers["x-exception"], letter.headers["x-exception-message"]) == (
        "psycopg.errors.CheckViolation",
        words,
    )
    errors = [event["error"] for event in events if event["event"] in ("message.failed", "message.dead")]
    assert errors == [f"psycopg.errors.CheckViolation: {words}"] * 2
