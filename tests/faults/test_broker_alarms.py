"""The broker blocks publishers for an alarm: the relay waits, names it, and goes on by itself without repeats."""

import asyncio

import aio_pika
import psycopg
import pytest
from aio_pika.abc import AbstractQueue

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.testing.servers.rabbitmq import RabbitServer
from tests.faults.alarms import Alarm
from tests.faults.load import relaying, under_load
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

pytestmark = pytest.mark.drills

CONFIRM_TIMEOUT = 1.0  # seconds; an alarm lasts longer
HEARTBEAT = 2  # seconds; TCP_USER_TIMEOUT is twice that

INSERT_LARGE = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'customer', n::text, 'InvoiceIssued', to_json(repeat('x', 1000000)) FROM generate_series(1, %s) AS n
"""
SENT = "SELECT count(*) FROM outbox.message WHERE state = 'sent' AND attempts = 0"


async def test_an_alarm_is_waited_out_and_nothing_comes_twice(
    settings: Settings, database_url: str, broker_url: str, alarm: Alarm
) -> None:
    """An alarm outlasts the confirm timeout; the relay keeps its connection, names the alarm, and repeats nothing."""
    impatient = changed(settings, confirm_timeout=CONFIRM_TIMEOUT)
    async with under_load(database_url, broker_url) as load, relaying(impatient) as node:
        await load.comes_on()

        for _ in range(2):  # it flaps
            before = node.snapshot().blocked_seconds
            await alarm.raise_()
            await eventually(lambda: is_blocked(node, alarm), "it says why")
            await eventually(lambda: has_lasted(node, before + 2 * CONFIRM_TIMEOUT), "the alarm lasts")  # noqa: B023
            await alarm.clear()
            await load.comes_on()

        await eventually(lambda: node.hindrances() == {}, "all is well")  # a stall is looked for once a second
        assert node.snapshot().broker_losses == {}
        await load.finish()
    assert load.repeats == 0


@pytest.mark.parametrize("alarm", ["memory"], indirect=True)
async def test_a_full_socket_is_waited_for_during_an_alarm(
    settings: Settings, database_url: str, broker_url: str, alarm: Alarm
) -> None:
    """An alarm lasts while the socket to the broker is full; the relay keeps its connection and sends each row once."""
    # The broker's kernel takes no more, for longer than TCP_USER_TIMEOUT would allow.
    rows = 40
    async with (
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection,
        await aio_pika.connect(broker_url) as broker,
        relaying(changed(settings, heartbeat=HEARTBEAT)) as node,
    ):
        queue = await declare_bound(await broker.channel(), "events")
        await alarm.raise_()
        await connection.execute(INSERT_LARGE, [rows])
        await eventually(lambda: is_blocked(node, alarm), "it says why")
        await eventually(lambda: has_lasted(node, 3 * HEARTBEAT), "the alarm lasts")
        await alarm.clear()

        async def is_sent() -> bool:
            return await (await connection.execute(SENT)).fetchone() == (rows,)

        await eventually(is_sent, "every row is sent at the first attempt", 40)
        assert node.snapshot().broker_losses == {}
        await eventually(lambda: has(queue, rows), "each is in the queue, once")


@pytest.mark.parametrize("alarm", ["memory"], indirect=True)
async def test_a_connection_lost_during_an_alarm_is_replaced(
    settings: Settings, database_url: str, broker_url: str, rabbitmq: RabbitServer, alarm: Alarm
) -> None:
    """The connection is closed during an alarm; the relay opens another, and repeats at most what was in flight."""
    async with under_load(database_url, broker_url) as load, relaying(settings) as node:
        await load.comes_on()
        await alarm.raise_()
        await eventually(lambda: is_blocked(node, alarm), "it says why")

        vhost = broker_url.rpartition("/")[2]
        await asyncio.to_thread(rabbitmq.ctl, "close_all_connections", "--vhost", vhost, "by an operator")
        await eventually(lambda: node.snapshot().broker_losses == {"connection_forced": 1}, "it notices")
        await alarm.clear()

        await load.comes_on()
        await load.finish()
    assert load.repeats <= settings.relay.max_in_flight


async def has(queue: AbstractQueue, messages: int) -> bool:
    return (await queue.declare()).message_count == messages


def changed(settings: Settings, **broker: float) -> Settings:
    return settings.model_copy(update={"broker": settings.broker.model_copy(update=broker)})


def is_blocked(node: Node, alarm: Alarm) -> bool:
    return node.hindrances().get("broker") == alarm.reason


def has_lasted(node: Node, seconds: float) -> bool:
    return node.snapshot().blocked_seconds >= seconds
