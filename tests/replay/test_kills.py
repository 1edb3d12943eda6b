"""A replay that is killed, stopped or cut off goes on where it was: nothing is missing, and each key is in order."""

import os
import secrets
import signal
from random import Random

import pytest
from aio_pika.abc import AbstractIncomingMessage
from pamqp.common import FieldTable
from yarl import URL

from tests.replay.conftest import Commands
from tests.replay.sent import Copies, SentRows, faults, ids_of, repeats
from tests.support.eventually import eventually
from tests.support.proxy import Act, FaultProxy

KILLS = 10
SEED_VARIABLE = "TEST_SEED"  # the seed of an earlier run, to run it again
FAST = ("--rate", "100000")  # from the first message on
STEADY = ("--rate", "1000")  # so that a slow machine's ten kills come long before the end
RESUME = ("jobs", "resume", "1")


@pytest.mark.drills
@pytest.mark.timeout(300)
async def test_ten_kills_miss_nothing_and_repeat_only_what_was_not_saved(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    """A replay is killed ten times; resumed, it misses no message, and repeats only what was not saved."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"{SEED_VARIABLE}={seed}")  # shown when the test fails
    chance = Random(seed)
    ids = [*await sent.add(10_000, keys=300, days_ago=1), *await sent.add(10_000, keys=300)]
    messages: list[AbstractIncomingMessage] = []

    arguments: tuple[str, ...] = ("replay", "--all")
    for _ in range(KILLS):
        saved = await sent.value("SELECT coalesce(max(position), 0) FROM outbox.job")
        replaying = relay.start(*arguments, *STEADY)
        await copies.has(chance.randrange(1, 1000))
        replaying.stop(signal.SIGKILL)
        await eventually(lambda: has_no_session(sent), "the killed one's session is gone")
        arrived = await copies.read()
        assert min(ids_of(arrived)) > saved
        messages += arrived
        arguments = RESUME
    ended = await relay(*RESUME, *FAST)
    messages += await copies.read()

    (job,) = await relay.jobs()
    assert ended.code == 0, ended.said
    assert faults(ids, messages) == []
    assert (job["state"], job["selected"], job["done"], job["failed"]) == ("done", 20_000, 20_000, 0)


async def test_a_broker_that_goes_away_is_waited_for(
    relay: Commands, sent: SentRows, copies: Copies, broker_url: str
) -> None:
    ids = await sent.add(8000, keys=300)
    url = URL(broker_url)
    async with FaultProxy(str(url.host), url.port or 5672) as proxy:
        own = {"RELAY_BROKER_URL": str(url.with_port(proxy.port))}
        replaying = relay.start("replay", "--all", "--rate", "1500", **own)

        def outages() -> int:
            return relay.said(replaying).count("broker.degraded")

        for goal in (500, 1500):
            await copies.has(goal)
            before = outages()
            proxy.refusing = True
            proxy.cut(Act.RESET)
            await eventually(lambda: outages() > before, "it notices")  # noqa: B023
            proxy.refusing = False
        ended = await relay.end(replaying)

    (job,) = await relay.jobs()
    assert ended.code == 0, ended.said
    assert faults(ids, await copies.read()) == []
    assert (job["done"], job["failed"]) == (8000, 0)


async def test_a_database_session_that_is_lost_is_opened_again(relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(6000, keys=300)
    replaying = relay.start("replay", "--all", "--rate", "1500")
    await copies.has(500)

    await sent.value(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'outbox-relay replay'"
    )
    ended = await relay.end(replaying)

    messages = await copies.read()
    assert ended.code == 0, ended.said
    assert "database.degraded" in ended.said
    assert faults(ids, messages) == []
    assert repeats(messages) == 0


async def test_a_queue_that_refuses_now_and_then_gets_every_key_in_order(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    ids = await sent.add(3000, keys=20)
    full: FieldTable = {"x-queue-type": "quorum", "x-max-length": 40, "x-overflow": "reject-publish"}
    queue = await copies.channel.declare_queue("full", durable=True, arguments=full)
    messages: list[AbstractIncomingMessage] = []

    async def take(message: AbstractIncomingMessage) -> None:
        messages.append(message)
        await message.ack()

    await copies.channel.set_qos(prefetch_count=5)
    await queue.consume(take)
    ended = await relay("replay", "--all", "--to-exchange", "", "--routing-key", "full", *FAST)
    await eventually(lambda: len(messages) >= len(ids), "all are consumed")

    (job,) = await relay.jobs()
    assert ended.code == 0, ended.said
    assert faults(ids, messages) == []
    assert job["failed"] == 0


async def test_a_cancel_ends_a_replay_that_runs(relay: Commands, sent: SentRows, copies: Copies) -> None:
    await sent.add(5000)
    replaying = relay.start("replay", "--all", "--rate", "50")  # it must not end by itself, however slow the machine
    await copies.has(20)

    cancelled = await relay.ask("jobs", "cancel", "1", "--by", "ada", "--why", "the wrong filter", "--yes")
    ended = await relay.end(replaying)

    (job,) = await relay.jobs()
    resumed = await relay(*RESUME)
    assert (cancelled.code, ended.code, resumed.code) == (0, 3, 2)
    assert "replay 1 is cancelled after" in ended.said
    assert (job["state"], job["cancelled_by"], job["cancelled_why"]) == ("cancelled", "ada", "the wrong filter")
    assert job["done"] <= len(await copies.read()) < 5000


async def has_no_session(sent: SentRows) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-relay replay'"
    return bool(await sent.value(query) == 0)
