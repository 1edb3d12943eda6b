"""The repairs of the consumer's alerts: each test makes the fault, runs the page's commands, and sees it gone."""

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Overload, WorkPolicy
from relay.consume.classify import FailureReason
from relay.operate.sent.selection import SentSelection
from relay.operate.sent.work import order_replay
from relay.operate.session import session
from tests.consume.effects import QUEUE, Queue, Stumbling, Table, count
from tests.consume.policies import QUICK, SEVERAL_MINUTES
from tests.consume.process import environment
from tests.dead_letters.letters import Letters
from tests.http.consumers import serving
from tests.http.site import Site
from tests.prose.pages import ROOT
from tests.runbooks.repair import Operator
from tests.support.eventually import eventually

WORKER = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
runpy.run_module("tests.consume.process", run_name="__main__")
"""


@pytest.fixture
async def stranger(database_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A session that stands in the way, and is ended."""
    connection = await psycopg.AsyncConnection.connect(database_url, application_name="report")
    yield connection
    await connection.close()


@pytest.mark.parametrize("alert", ["OutboxConsumerDown", "OutboxConsumerLag"])
async def test_a_process_that_is_started_applies_what_waits(
    alert: str,
    operator: Operator,
    *,
    queue: Queue,
    table: Table,
    database: DatabaseSettings,
    broker: BrokerSettings,
    tmp_path: Path,
) -> None:
    await queue.send_all(range(3))
    (tmp_path / "worker.py").write_text(WORKER)
    started = Operator(tmp_path, environment(database, broker))

    async def are_applied() -> bool:
        return await table.numbers() == [0, 1, 2]

    async with started.repairing(alert):
        await eventually(are_applied, "all are applied")


async def test_a_session_in_front_of_a_handler_ends(
    operator: Operator,
    *,
    queue: Queue,
    table: Table,
    inbox: Inbox,
    broker: BrokerSettings,
    stranger: psycopg.AsyncConnection,
) -> None:
    await stranger.execute("LOCK TABLE effect IN ACCESS EXCLUSIVE MODE")
    await queue.send(1)
    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(stall_after=0.5))
    async with serving(consumer) as site:
        await eventually(lambda: site.is_unready("delivery"), "it stalls")

        told = await operator.repair("OutboxConsumerStalled", PID=stranger.info.backend_pid)

        await eventually(lambda: consumer.counters.applied == 1, "it is applied")
        await eventually(site.is_ready, "it is ready")
    assert str(stranger.info.backend_pid) in told


async def test_a_consumer_goes_on_when_the_overload_is_over(
    operator: Operator, queue: Queue, table: Table, *, inbox: Inbox, broker: BrokerSettings
) -> None:
    stumbling = Stumbling({1: 1_000_000}, Overload("429"))
    await queue.send(1)
    consumer = Consumer(queue.name, [stumbling.handle], inbox=inbox, broker=broker, work=WorkPolicy(backoff=QUICK))
    async with serving(consumer) as site:
        await eventually(lambda: site.is_unready("overload"), "it pauses")

        stumbling.failures.clear()

        await eventually(site.is_ready, "it goes on")
        await operator.repair("OutboxConsumerPaused", ADDRESS=site.address)


@pytest.mark.parametrize(
    ("alert", "reason"),
    [
        ("OutboxConsumerDeadLetters", FailureReason.PERMANENT),
        ("OutboxConsumerRetriesExhausted", FailureReason.EXHAUSTED),
        ("OutboxConsumerPoisoned", FailureReason.POISONED),
    ],
)
async def test_dead_letters_are_tried_again(
    alert: str, reason: FailureReason, operator: Operator, letters: Letters
) -> None:
    await letters.put(7, reason=reason)

    await operator.repair(alert, QUEUE=QUEUE)

    assert await letters.queue.dead_count() == 0
    assert [message.body for message in await letters.queue.ready()] == [b"7"]


async def test_held_messages_are_tried_at_once(
    operator: Operator, queue: Queue, table: Table, *, inbox: Inbox, broker: BrokerSettings
) -> None:
    stumbling = Stumbling({0: 1})
    await queue.send_all(range(3))
    failures = FailurePolicy(retries=SEVERAL_MINUTES)
    consumer = Consumer(queue.name, [stumbling.handle], inbox=inbox, broker=broker, failures=failures)
    async with serving(consumer) as site:
        await eventually(lambda: are_held(site, 3), "one is held, and two behind it")

        await operator.repair("OutboxConsumerHeldGrows")

        await eventually(lambda: are_held(site, 0), "all are applied")
    assert await table.numbers() == [0, 1, 2]


async def test_a_replay_that_nobody_wants_ends(operator: Operator, database: DatabaseSettings) -> None:
    with session(database) as tables:
        job = order_replay(tables, SentSelection(), by="a test")

        await operator.repair("OutboxConsumerDuplicates", ID=job.id)

        (state,) = tables.connection.execute("SELECT state FROM outbox.job").fetchone() or ("",)
    assert state == "cancelled"


async def are_held(site: Site, number: int) -> bool:
    held = {value for (name, _), value in (await site.metrics()).items() if name == "outbox_consumer_held_messages"}
    return held == {number}
