"""The README's consumer dies 25 times with messages in hand. RabbitMQ 4 takes a message back 20 times by default.

Each message is applied in the end, or is among the dead letters.
"""

import json
import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

import aio_pika
import psycopg
import pytest
from aio_pika.abc import AbstractChannel

from relay.config.settings import DatabaseSettings
from relay.testing.servers.process import Process, run
from tests.cli.command import RELAY
from tests.prose.pages import programs
from tests.support.eventually import eventually

pytestmark = [pytest.mark.drills, pytest.mark.timeout(1200)]

CRASHES, MESSAGES = 25, 8
QUEUE, DEAD = "invoices", "invoices.dead"
OURS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-consumer%'"
WAITING = f"SELECT count(*) > 0 {OURS} AND wait_event_type = 'Lock'"
END_SESSIONS = f"SELECT pg_terminate_backend(pid) {OURS}"  # of the dead process, which still wait for the lock


async def test_twenty_five_crashes_of_the_readmes_consumer_lose_nothing(
    empty_database: DatabaseSettings, broker_url: str, tmp_path: Path
) -> None:
    """The process is killed while its handlers wait for a lock, and started again; then the lock is released."""
    _, program, _ = programs("README.md", "python")  # the writer, the consumer, Spark
    url = empty_database.url.get_secret_value()
    (tmp_path / "relay.toml").write_text(programs("README.md", "toml")[0])
    environment = {**os.environ, "RELAY_DATABASE_URL": url, "RELAY_BROKER_URL": broker_url}
    relay: list[str | Path] = ["env", "--chdir", tmp_path, RELAY]

    def consumer() -> Process:
        return Process([sys.executable, "-c", program], log=tmp_path / "consumer", environment=environment)

    async with (
        await aio_pika.connect(broker_url) as broker,
        await psycopg.AsyncConnection.connect(url, autocommit=True) as connection,
        await psycopg.AsyncConnection.connect(url) as blocker,
    ):
        run([*relay, "migrate"], environment=environment)
        await connection.execute("CREATE SCHEMA billing CREATE TABLE invoice_projection (id bigint, amount numeric)")
        run([*relay, "topology", "apply"], environment=environment)
        channel = await broker.channel()
        await send(channel)

        await blocker.execute("LOCK TABLE billing.invoice_projection")
        for _ in range(CRASHES):
            process = consumer()
            await eventually(lambda: is_true(connection, WAITING), "a handler waits")
            process.stop(signal.SIGKILL)
            await connection.execute(END_SESSIONS)
        await blocker.rollback()

        async def are_settled() -> bool:
            return len(await applied(connection)) + await count(channel, DEAD) == MESSAGES

        process = consumer()
        try:
            await eventually(are_settled, "each is applied, or a dead letter")
        finally:
            process.stop(signal.SIGTERM)

        numbers = [*await applied(connection), *await dead(channel)]
    assert sorted(numbers) == list(range(MESSAGES))


async def send(channel: AbstractChannel) -> None:
    for number in range(MESSAGES):
        message = aio_pika.Message(
            json.dumps({"invoice": number, "amount": 1}).encode(),
            message_id=str(uuid4()),
            type="InvoiceIssued",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            headers={"x-aggregate-type": "customer", "x-aggregate-id": str(number)},
        )
        await channel.default_exchange.publish(message, QUEUE, mandatory=True)


async def is_true(connection: psycopg.AsyncConnection, statement: str) -> bool:
    row = await (await connection.execute(statement.encode())).fetchone()
    return row is not None and bool(row[0])


async def applied(connection: psycopg.AsyncConnection) -> list[int]:
    cursor = await connection.execute("SELECT id FROM billing.invoice_projection")
    return [number for (number,) in await cursor.fetchall()]


async def count(channel: AbstractChannel, queue: str) -> int:
    declared = await channel.declare_queue(queue, passive=True)
    return declared.declaration_result.message_count or 0


async def dead(channel: AbstractChannel) -> list[int]:
    queue, numbers = await channel.get_queue(DEAD), []
    while (letter := await queue.get(no_ack=True, fail=False)) is not None:
        numbers.append(json.loads(letter.body)["invoice"])
    return numbers
