"""The plain clients, to which the benchmarks compare the relay's pauses."""

import asyncio

import psycopg
import pytest

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.eventually import eventually
from tests.support.plain_client import PlainClient, PlainPublisher, PlainWriter, longest_pause


@pytest.mark.parametrize(
    ("moments", "since", "pause"),
    [
        ([], 0.0, 0.0),
        ([7.0], 0.0, 0.0),
        ([1.0, 2.0, 5.0, 6.0], 0.0, 3.0),
        ([1.0, 2.0, 5.0, 6.0], 4.0, 3.0),  # it had begun before
        ([1.0, 2.0, 5.0, 6.0], 5.0, 1.0),
    ],
)
def test_the_longest_pause_is_the_one_that_ends_late_enough(moments: list[float], since: float, pause: float) -> None:
    assert longest_pause(moments, since) == pause


async def test_a_publisher_goes_on_when_its_connection_is_closed(rabbitmq: RabbitServer, broker_url: str) -> None:
    client = PlainPublisher([broker_url])
    await client.declare(broker_url)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.run())
        await has_answers(client, 1)
        vhost = broker_url.rpartition("/")[2]
        rabbitmq.ctl("close_all_connections", "--vhost", vhost, "enough")
        await has_answers(client, len(client.answered_at) + 1)
        running.cancel()

    assert client.pause > 0


async def test_a_writer_goes_on_when_its_session_is_ended(postgres: PostgresServer, database_url: str) -> None:
    client = PlainWriter(database_url)
    await client.create()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.run())
        await has_answers(client, 1)
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as operator:
            await operator.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        await has_answers(client, len(client.answered_at) + 1)
        running.cancel()

    assert client.pause > 0


async def has_answers(client: PlainClient, count: int) -> None:
    await eventually(lambda: len(client.answered_at) >= count, "the client goes on")
