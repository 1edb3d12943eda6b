"""A test's own database, virtual host and queue, in the shape in which the benchmarks take their servers."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import aio_pika
import pytest
from pamqp.common import FieldTable

from bench.frame import queue
from bench.frame.backlog import ROUTING_KEY
from bench.frame.servers import Servers
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer

Forget = Callable[[int], Awaitable[None]]


@pytest.fixture
def servers(
    postgres: PostgresServer, rabbitmq: RabbitServer, database_url: str, broker_url: str, tmp_path: Path
) -> Servers:
    queue.bind_queue(broker_url, ROUTING_KEY)
    return Servers(database_url, postgres.pid, broker_url, rabbitmq.pid, tmp_path)


@pytest.fixture
def forget_all_but(servers: Servers) -> Forget:
    """Make the queue again as one that drops its oldest messages when it holds more than so many."""

    async def forget(messages: int) -> None:
        async with await aio_pika.connect(servers.broker_url) as connection, connection.channel() as channel:
            await channel.queue_delete(queue.QUEUE)
            arguments: FieldTable = {"x-queue-type": "quorum", "x-max-length": messages}
            dropping = await channel.declare_queue(queue.QUEUE, durable=True, arguments=arguments)
            await dropping.bind(queue.EXCHANGE, ROUTING_KEY)

    return forget
