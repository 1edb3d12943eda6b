"""Each fault that the runbooks name makes its alert fire, and no other; a real Prometheus watches."""

import asyncio
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import BrokerSettings
from relay.consume import Inbox
from relay.testing.servers.process import Process
from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import Queue, Table
from tests.consume.process import COMMAND, POISON, environment
from tests.faults.alarms import Alarm
from tests.observe.conftest import POISON_LIMIT, Watch
from tests.operate.rows import Rows
from tests.support.days import ADD_DAY
from tests.support.eventually import eventually

pytestmark = [pytest.mark.drills, pytest.mark.timeout(240)]

TAKE_LANE = "SELECT pg_advisory_lock(hashtext('outbox.lane'), 3)"
OLD_BACKLOG = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, created_at)
    SELECT 'invoice', 'one', 'Issued', '{}', now() - interval '90 s' FROM generate_series(1, 15000)
"""


async def test_a_poison_message(
    watch: Watch, queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, tmp_path: Path
) -> None:
    """A message has killed each process that handled it; it is given up, and its alert fires."""
    await queue.send(POISON)
    variables = environment(inbox.database, broker, poison_limit=POISON_LIMIT)
    for _ in range(POISON_LIMIT):
        process = Process(COMMAND, log=tmp_path / "log", environment=variables)
        await eventually(lambda process=process: not process.is_running(), "it dies")

    async with watch(already="OutboxConsumerPoisoned") as watched:  # the consumer gives it up as soon as it is there
        await watched.fires_alone("OutboxConsumerPoisoned")
        await watched.ends("OutboxConsumerPoisoned")


async def test_a_backlog_that_grows(watch: Watch, rows: Rows) -> None:
    """Old rows of one key take the relay some seconds; the alert fires meanwhile, and ends with them."""
    async with watch() as watched:
        rows.connection.execute(OLD_BACKLOG)
        await watched.fires_alone("OutboxOldestPendingAge")
        rows.connection.execute("UPDATE outbox.message SET available_at = now() WHERE state = 'pending'")
        await watched.ends("OutboxOldestPendingAge")


async def test_a_storm_of_duplicates(watch: Watch, queue: Queue, table: Table) -> None:
    """One message comes again and again; the inbox absorbs it, and its alert fires."""
    async with watch() as watched:
        message_id = await queue.send(1)

        async def storm() -> None:
            while True:
                await queue.send(1, message_id=message_id)
                await asyncio.sleep(0.05)

        storming = asyncio.create_task(storm())
        await watched.fires_alone("OutboxConsumerDuplicates")
        storming.cancel()
        with suppress(asyncio.CancelledError):
            await storming
        await watched.ends("OutboxConsumerDuplicates")


async def test_a_broker_that_blocks(watch: Watch, rows: Rows, table: Table) -> None:
    """The broker raises its alarm for memory and blocks the relay; its alert fires until the alarm is over."""
    with RabbitServer(schedulers=1) as node:
        async with watch(broker=BrokerSettings(url=SecretStr(node.url()))) as watched:
            alarm = Alarm(node, "memory")
            await alarm.raise_()
            rows.pending()
            await watched.fires_alone("OutboxBrokerBlocked")
            await alarm.clear()
            await watched.ends("OutboxBrokerBlocked")


async def test_a_failover_of_the_database(watch: Watch, rows: Rows, table: Table) -> None:
    """Every session of the relay ends, as in a failover, and the relay connects again; its alert fires."""
    async with watch() as watched:
        rows.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'outbox-relay%' AND datname = current_database()"
        )
        await watched.fires_alone("OutboxDatabaseLost")
        await watched.ends("OutboxDatabaseLost")


async def test_a_stuck_key(watch: Watch, rows: Rows, table: Table) -> None:
    """A row waits behind a parked one of its key; its alert fires until the parked one is discarded."""
    async with watch() as watched:
        rows.parked("1", behind=rows.parked("1"))
        await watched.fires_alone("OutboxKeyStuck")
        rows.connection.execute("DELETE FROM outbox.message WHERE state = 'parked'")
        await watched.ends("OutboxKeyStuck")


async def test_a_lost_lane(watch: Watch, table: Table, stranger: psycopg.AsyncConnection) -> None:
    """Another session holds a lane; its alert fires until that session ends."""
    await stranger.execute(TAKE_LANE)
    async with watch() as watched:
        await watched.fires_alone("OutboxLaneLost")
        await stranger.close()
        await watched.ends("OutboxLaneLost")


async def test_retention_that_is_behind(watch: Watch, rows: Rows, table: Table) -> None:
    """A day is older than is kept; its alert fires until the day is gone."""
    async with watch() as watched:
        rows.connection.execute(ADD_DAY, {"ago": 20})
        await watched.fires_alone("OutboxRetentionBehind")
        rows.connection.execute(
            "SELECT * FROM outbox.drop_sent_day((now() AT TIME ZONE 'UTC')::date - 20, false, false)"
        )
        await watched.ends("OutboxRetentionBehind")


async def test_an_archive_that_is_behind(watch: Watch, rows: Rows, table: Table) -> None:
    """Two days are over and not archived; its alert fires until they are."""
    async with watch() as watched:
        for ago in (1, 2, 3):
            rows.connection.execute(ADD_DAY, {"ago": ago})
        archive = (
            "INSERT INTO outbox.archived_day (day, rows, checksum, path)"
            " SELECT (now() AT TIME ZONE 'UTC')::date - ago, 0, 0, '/archive' FROM unnest(%s::integer[]) AS given (ago)"
        )
        rows.connection.execute(archive, [[3]])
        await watched.fires_alone("OutboxArchiveBehind")
        rows.connection.execute(archive, [[1, 2]])
        await watched.ends("OutboxArchiveBehind")


async def test_a_consumer_that_stalls(
    watch: Watch, queue: Queue, table: Table, stranger: psycopg.AsyncConnection
) -> None:
    """A handler waits for a lock of another session; its alert fires until that session ends."""
    await stranger.execute("LOCK TABLE effect IN ACCESS EXCLUSIVE MODE")
    async with watch() as watched:
        await queue.send(1)
        await watched.fires_alone("OutboxConsumerStalled")
        await stranger.rollback()
        await watched.ends("OutboxConsumerStalled")
