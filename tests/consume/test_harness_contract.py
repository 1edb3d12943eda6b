"""What the harness of `relay.testing` says becomes of messages is what a consumer does with them on a real broker."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import pytest

from relay.consume import FailurePolicy, Inbox, Message, Permanent, Retries, WorkPolicy, on
from relay.outbox import Event
from relay.testing import Harness
from tests.consume.effects import MakeConsumer, Queue, Stumbling, Table, running
from tests.support.eventually import eventually

RETRIES = Retries(attempts=3, initial=0.05, maximum=0.05)
HOUR = 3600.0


@dataclass(frozen=True)
class Scenario:
    """Messages, as number and key, and how often the handler fails on each number."""

    messages: Sequence[tuple[int, str | None]]
    failures: dict[int, int] = field(default_factory=dict)
    error: Exception | None = None
    times: int = 1
    event_type: str = "Counted"
    work: WorkPolicy = WorkPolicy(concurrency=2)  # noqa: RUF009 (immutable)


@dataclass(frozen=True)
class Outcome:
    """What is left when all is settled, and no message waits."""

    effects: dict[str | None, list[int]]  # by key, in order
    dead: list[tuple[int, str, int]]  # number, reason, attempts
    calls: dict[int, int]  # of the handler, by number
    duplicates: int


SCENARIOS = {
    "in order": Scenario([(number, key) for number in range(10) for key in "ab"]),
    "without a key": Scenario([(1, None), (2, None), (3, None)]),
    "twice": Scenario([(1, "a"), (2, "b")], times=2),
    "fails once": Scenario([(1, "a"), (2, "a"), (3, "b")], {1: 1}),
    "fails always": Scenario([(1, "a"), (2, "a"), (3, "b")], {1: 9}),
    "fails always, twice": Scenario([(1, "a"), (2, "a")], {1: 9}, times=2),
    "permanent": Scenario([(1, "a"), (2, "a")], {1: 9}, error=Permanent("no")),
    "unhandled": Scenario([(1, "a"), (2, "b")], event_type="Unknown"),
    "a batch": Scenario([(n, "a") for n in range(5)], {0: 1}, work=WorkPolicy(concurrency=1, batch_size=5)),
}

Play = Callable[[Scenario, Any], Awaitable[Outcome]]


def event_of(scenario: Scenario, number: int, key: str | None) -> Event:
    # The same id for each delivery of a number: a repeat.
    message_id = UUID(int=(number << 16) + ord(key or "-"))
    return Event("counter", key, scenario.event_type, str(number), message_id=message_id)


async def effects_of(scenario: Scenario, table: Table) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = {}
    for key in {key for _, key in scenario.messages}:
        numbers = await table.numbers(key)
        found[key] = numbers if key is not None else sorted(numbers)  # without a key there is no order
    return found


@pytest.fixture
def by_broker(queue: Queue, table: Table, make_consumer: MakeConsumer) -> Play:
    async def play(scenario: Scenario, order: Any) -> Outcome:
        handler = Stumbling(scenario.failures, scenario.error)
        for _ in range(scenario.times):
            for number, key in scenario.messages:
                event = event_of(scenario, number, key)
                await queue.send(number, key=key, message_id=str(event.message_id), event_type=scenario.event_type)

        async def comes() -> bool:
            return consumer.counters.acknowledged >= len(scenario.messages) * scenario.times

        @on("Counted")
        async def handle(message: Message, connection: psycopg.AsyncConnection) -> None:
            """Fail again when every copy has come: one that comes behind the last failure starts from zero."""
            if order == "hold" and scenario.times > 1 and handler.calls[message.json()]:
                await eventually(comes, "every copy has come")
            await handler.handle(message, connection)

        consumer = make_consumer(handle, order=order, retries=RETRIES, work=scenario.work)

        # A held message that comes again is the same row; in a retry queue it is a second copy.
        ends = len(scenario.messages) * (1 if order == "hold" and scenario.failures else scenario.times)

        async def is_settled() -> bool:
            counters = consumer.counters
            ended = counters.applied + counters.duplicates + sum(counters.dead_letters.values())
            return await comes() and ended >= ends and not await table.held_count()

        async with running(consumer):
            await eventually(is_settled, "all is settled")
        letters = [
            (int(each.body), str(each.headers["x-dead-reason"]), int(str(each.headers["x-dead-attempts"])))
            for each in await queue.dead()
        ]
        effects = await effects_of(scenario, table)
        return Outcome(effects, sorted(letters), dict(handler.calls), consumer.counters.duplicates)

    return play


@pytest.fixture
def by_harness(table: Table, inbox: Inbox) -> Play:
    async def play(scenario: Scenario, order: Any) -> Outcome:
        handler = Stumbling(scenario.failures, scenario.error)
        policy = FailurePolicy(order=order, retries=RETRIES)
        harness = Harness([handler.handle], inbox=inbox, failures=policy, work=scenario.work)
        events = [event_of(scenario, number, key) for number, key in scenario.messages]
        duplicates = (await harness.deliver(*events, times=scenario.times)).duplicates
        duplicates += (await harness.advance(HOUR)).duplicates
        letters = [(dead.event.payload(int), dead.reason, dead.attempts) for dead in harness.dead]
        return Outcome(await effects_of(scenario, table), sorted(letters), dict(handler.calls), duplicates)

    return play


@pytest.mark.parametrize("order", ["hold", "skip"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_both_come_to_the_same_end(
    name: str, order: Any, by_broker: Play, by_harness: Play, table: Table
) -> None:
    real = await by_broker(SCENARIOS[name], order)
    await table.connection.execute("TRUNCATE effect, outbox.processed_message, outbox.held_message")

    assert await by_harness(SCENARIOS[name], order) == real
