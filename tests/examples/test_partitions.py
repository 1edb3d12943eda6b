"""examples/partitions: the members' memory and the table agree with what was billed, whichever member dies."""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from relay.config.loading import load
from relay.config.settings import Settings
from relay.consume.pool.candidate import candidate_beside
from relay.servers.postgres.database import connect_async
from relay.servers.rabbitmq import topology
from relay.testing.servers.process import Process
from tests.engine.conftest import RunNode
from tests.examples.invoices import ISSUE, TABLES
from tests.support.eventually import eventually

EXAMPLE = Path("examples/partitions").resolve()

WRONG = """
    SELECT count(*) FROM (
        SELECT customer_id, count(*), sum(amount) FROM billing.invoice GROUP BY customer_id
        EXCEPT SELECT customer_id, invoices, amount FROM billing.customer_total
    ) AS wrong
"""


@pytest.fixture
async def connection(settings: Settings) -> AsyncIterator[psycopg.AsyncConnection]:
    listed = load(config=EXAMPLE / "relay.toml", environ={}).settings.topology
    assert not [each for each in await topology.apply(settings.broker, listed) if each.standing in topology.BAD]
    async with await connect_async(settings.database) as connection:
        await connection.execute(TABLES.encode())
        await connection.execute((EXAMPLE / "totals.sql").read_bytes())
        yield connection


@contextmanager
def member(settings: Settings, logs: Path, name: str) -> Iterator[Process]:
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": settings.database.url.get_secret_value(),
        "RELAY_BROKER_URL": settings.broker.url.get_secret_value(),
        "RELAY_HTTP_LISTEN": "",
    }
    command = [sys.executable, "-m", "examples.partitions.member"]
    process = Process(command, log=logs / name, environment=environment)
    try:
        yield process
    finally:
        process.stop(signal.SIGKILL)


@pytest.mark.drills
async def test_the_totals_are_right_after_a_death_and_an_orderly_leave(
    settings: Settings, connection: psycopg.AsyncConnection, run_node: RunNode, tmp_path: Path
) -> None:
    """A member is killed and another one leaves; every total is right at the end."""

    async def count(statement: str) -> int:
        row = await (await connection.execute(statement.encode())).fetchone()
        return int(row[0]) if row else 0

    async def issue(hundreds: int) -> None:
        for _ in range(hundreds):
            await connection.execute(ISSUE)

    async def are_shared() -> bool:
        return await count("SELECT count(DISTINCT member) FROM outbox.pool_partition WHERE member IS NOT NULL") == 2

    async def are_right() -> bool:
        return await count(WRONG) == 0

    async def are_begun() -> bool:
        return await count("SELECT count(*) FROM billing.customer_total") > 0

    async with run_node(settings), candidate_beside(settings):
        with member(settings, tmp_path, "a") as a, member(settings, tmp_path, "b") as b:
            await eventually(are_shared, "two members share the partitions")
            await issue(3)
            await eventually(are_begun, "they have begun")
            a.stop(signal.SIGKILL)
            await issue(3)
            await eventually(are_right, "the other one has them all")
            with member(settings, tmp_path, "c") as c:
                await eventually(are_shared, "a new one has joined")
                await issue(3)
                b.stop(signal.SIGTERM)
                await eventually(are_right, "the new one has them all")
                c.stop(signal.SIGTERM)
                assert (b.returncode, c.returncode) == (0, 0)

    assert await count("SELECT sum(invoices) FROM billing.customer_total") == 900
    assert "do not make" not in "".join((tmp_path / name).read_text() for name in "abc")
