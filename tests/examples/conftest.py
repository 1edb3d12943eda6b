"""The example examples/invoices on servers of a test: its tables and its queues."""

from collections.abc import AsyncIterator
from pathlib import Path

import aio_pika
import pytest

from relay.config.loading import load
from relay.config.settings import Settings
from relay.servers.postgres.database import connect_async
from relay.servers.rabbitmq import topology
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import channel, outbox, run_node
from tests.examples.invoices import DOWNSTREAM, EXAMPLE, TABLES, InvoiceExample
from tests.migrations.conftest import empty_database

__all__ = ["channel", "empty_database", "outbox", "run_node"]


@pytest.fixture
async def example(rabbitmq: RabbitServer, settings: Settings, tmp_path: Path) -> AsyncIterator[InvoiceExample]:
    listed = load(config=EXAMPLE / "relay.toml", environ={}).settings.topology
    assert not [each for each in await topology.apply(settings.broker, listed) if each.standing in topology.BAD]
    async with (
        await connect_async(settings.database) as connection,
        # One that comes back by itself: some drills restart the broker.
        await aio_pika.connect_robust(settings.broker.url.get_secret_value(), reconnect_interval=0.5) as broker,
    ):
        await connection.execute(TABLES.encode())
        await connection.execute(DOWNSTREAM)
        example = InvoiceExample(connection, broker, rabbitmq, settings, tmp_path)
        try:
            yield example
        finally:
            example.leave()
