"""Replays at the same time as each other, as the relay, and as retention."""

import signal
from collections import defaultdict

import psycopg
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from relay.config.settings import DatabaseSettings, Settings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on
from relay.errors import BusyError
from relay.jobs.work import Save
from relay.operate.sent.selection import SentSelection
from relay.operate.sent.session import ReplaySession
from relay.operate.sent.work import order_replay
from relay.operate.session import session as operator_session
from tests.consume.effects import running
from tests.replay.conftest import Commands
from tests.replay.sent import Copies, SentRows, faults, ids_of
from tests.support.eventually import eventually

INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', (n %% 20)::text, 'InvoiceIssued', to_json(n) FROM generate_series(%s::integer, %s) AS n
"""
ASKED = """
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'outbox-relay replay' AND datname = current_database() AND query LIKE '%%pg_locks%%'
"""
YESTERDAY = """
    SELECT to_char(((now() - interval '1 minute') AT TIME ZONE 'UTC')::date - 1, 'YYYYMMDD')
"""  # as SentRows.add has it
SENT = "SELECT count(*) FROM outbox.message WHERE state = 'sent'"


@on("InvoiceIssued")
async def count(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute("INSERT INTO effect VALUES (%s)", [message.json()])


async def test_two_replays_at_once_are_each_complete_and_in_order(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    ids = await sent.add(4000, keys=30)

    both = [relay.start("replay", "--all", "--rate", "4000") for _ in range(2)]
    ended = [await relay.end(process) for process in both]

    by_job: defaultdict[object, list[AbstractIncomingMessage]] = defaultdict(list)
    for message in await copies.read():
        by_job[message.headers["x-replay-id"]].append(message)
    assert [each.code for each in ended] == [0, 0]
    assert sorted(map(str, by_job)) == ["1", "2"]
    assert [faults(ids, messages) for messages in by_job.values()] == [[], []]


async def test_one_job_has_one_process(relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(2000)
    first = relay.start("replay", "--all", "--rate", "20")  # it must not end by itself, however slow the machine
    await eventually(lambda: "replay.listed" in relay.said(first), "it begins")

    second = await relay("jobs", "resume", "1")
    (job,) = await relay.jobs()
    first.stop(signal.SIGTERM)
    third = await relay("jobs", "resume", "1", "--rate", "100000")

    assert (second.code, third.code) == (1, 0)
    assert "replay 1 is run by another process" in second.said
    assert job["state"] == "running"
    assert faults(ids, await copies.read()) == []


async def test_a_job_that_two_begin_in_the_same_moment_is_run_by_one(database: DatabaseSettings) -> None:
    with operator_session(database) as tables:
        job = order_replay(tables, SentSelection())

    first = await ReplaySession.open(database, job, Save("outbox", job))
    with pytest.raises(BusyError, match="replay 1 is run by another process"):
        await ReplaySession.open(database, job, Save("outbox", job))
    await first.close()


@pytest.mark.drills
async def test_a_replay_that_races_the_original_takes_effect_once(
    relay: Commands, sent: SentRows, copies: Copies, settings: Settings
) -> None:
    """Four replays race the relay and a consumer; each message takes effect once."""
    await sent.connection.execute("CREATE TABLE effect (number integer NOT NULL)")
    queue = await copies.channel.declare_queue("effects", durable=True, arguments={"x-queue-type": "quorum"})
    await queue.bind("outbox", "#")
    inbox = Inbox(settings.database, "projection")
    consumer = Consumer(
        "effects", [count], inbox=inbox, broker=settings.broker, work=WorkPolicy(concurrency=4, batch_size=20)
    )
    live = relay.start("run")

    async with running(consumer):
        replays = []
        for first in range(1, 2001, 500):
            await sent.connection.execute(INSERT, [first, first + 499])
            replays.append(relay.start("replay", "--all", "--rate", "2000"))
        ended = [await relay.end(process) for process in replays]
        await eventually(lambda: all_sent(sent, 2000), "the relay has sent all")
        last = await relay("replay", "--all", "--rate", "10000")
        await eventually(lambda: all_applied(sent, 2000), "every effect is there")
        await eventually(lambda: is_empty(copies.channel, "effects"), "all is consumed")
    live.stop(signal.SIGTERM)

    replayed = sum(job["done"] for job in await relay.jobs())
    messages = await copies.read()
    assert [each.code for each in [*ended, last]] == [0] * 5
    assert sum("x-replay-id" in message.headers for message in messages) == replayed >= 2000
    assert await sent.value("SELECT count(*) FROM effect") == 2000
    assert await sent.value("SELECT count(DISTINCT number) FROM effect") == 2000


async def test_a_row_whose_mark_had_begun_is_waited_for(relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(10)
    async with sent.connection.transaction():
        ids += await sent.add(5)  # sent before the replay is made, and not visible yet
        replaying = relay.start("replay", "--all")
        await eventually(lambda: has_asked_for_marks(sent), "it has looked for marks that run")
    ended = await relay.end(replaying)

    assert ended.code == 0, ended.said
    assert faults(ids, await copies.read()) == []


async def test_a_day_that_is_dropped_meanwhile_is_told(relay: Commands, sent: SentRows, copies: Copies) -> None:
    kept = await sent.add(3000)
    await sent.add(3000, days_ago=1)
    replaying = relay.start("replay", "--all", "--rate", "1500")
    await eventually(lambda: "replay.listed" in relay.said(replaying), "it begins")

    day = await sent.value(YESTERDAY)
    await sent.connection.execute(f"DROP TABLE outbox.message_sent_{day}".encode())
    ended = await relay.end(replaying)

    assert ended.code == 1
    assert "replay.listed_again" in ended.said
    assert "rows are gone" in ended.said
    assert faults(kept, [m for m in await copies.read() if ids_of([m])[0] in set(kept)]) == []


async def test_a_day_that_is_rewritten_meanwhile_is_read_on(relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(6000)
    replaying = relay.start("replay", "--all", "--rate", "1500")
    await eventually(lambda: "replay.listed" in relay.said(replaying), "it begins")

    await sent.connection.execute("DELETE FROM outbox.message WHERE id = %s", [ids[-1]])
    await sent.connection.execute("VACUUM FULL outbox.message_sent")
    ended = await relay.end(replaying)

    assert "replay.listed_again" in ended.said
    assert faults(ids[:-1], await copies.read()) == []


async def all_sent(sent: SentRows, number: int) -> bool:
    return bool(await sent.value(SENT) == number)


async def all_applied(sent: SentRows, number: int) -> bool:
    return bool(await sent.value("SELECT count(*) FROM outbox.processed_message") == number)


async def is_empty(channel: AbstractChannel, queue: str) -> bool:
    declared = await channel.declare_queue(queue, passive=True)
    return declared.declaration_result.message_count == 0


async def has_asked_for_marks(sent: SentRows) -> bool:
    await sent.connection.execute("SELECT pg_stat_clear_snapshot()")
    return bool(await sent.value(ASKED) == 1)
