"""`relay run` must stop while all processes of the servers are frozen: it ends in its time, with exit code 0."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM

import aio_pika
import psycopg
import pytest

from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.rabbitmq import RabbitServer
from relay.testing.servers.server import PrivateServer
from tests.engine.conftest import Outbox, Reader
from tests.faults.victim import relay_victim
from tests.support.eventually import eventually
from tests.support.queues import declare_bound
from tests.support.template import template_of

pytestmark = pytest.mark.drills

ROWS = 2000


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of this test alone."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def rabbitmq() -> Iterator[RabbitServer]:
    """A broker of this test alone."""
    with RabbitServer(schedulers=1) as node:
        yield node


@pytest.fixture
def database_url(postgres: PostgresServer) -> str:
    return postgres.create_database("outbox", template=template_of(postgres))


@pytest.fixture
async def queue(broker_url: str) -> AsyncIterator[Reader]:
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        yield Reader(channel, await declare_bound(channel, "events"))


@pytest.mark.parametrize("is_loaded", [False, True], ids=["idle", "loaded"])
@pytest.mark.parametrize("frozen", ["database", "broker", "database and broker"])
async def test_a_stop_with_frozen_servers(
    frozen: str,
    *,
    is_loaded: bool,
    postgres: PostgresServer,
    rabbitmq: RabbitServer,
    database_url: str,
    broker_url: str,
    queue: Reader,
    tmp_path: Path,
) -> None:
    """A relay must stop while servers are frozen; it exits with 0, and the next relay sends the remaining rows."""
    servers = [each for name, each in (("database", postgres), ("broker", rabbitmq)) if name in frozen]
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        outbox = Outbox(connection)
        victim = relay_victim(database_url, broker_url, tmp_path)
        await victim.start()
        if is_loaded:
            await outbox.insert_many(ROWS, keys=ROWS)
            await eventually(lambda: _has_sent(outbox), "it sends")
        with _frozen(*servers):
            code = await asyncio.to_thread(victim.stop, SIGTERM)
            log = victim.log.read_text()

        await victim.start()
        await eventually(outbox.is_empty, "the next one sends the rest")
        assert await asyncio.to_thread(victim.stop, SIGTERM) == 0
        sent = await outbox.ids("sent")

    assert code == 0, log
    delivered = {int(str(message.headers["x-outbox-id"])) for message in await queue.everything()}
    assert delivered == set(sent)
    assert len(sent) == (ROWS if is_loaded else 0)


async def _has_sent(outbox: Outbox) -> bool:
    return bool(await outbox.ids("sent"))


@contextmanager
def _frozen(*servers: PrivateServer) -> Iterator[None]:
    processes = [pid for server in servers for pid in _family(server.pid)]
    for pid in processes:
        os.kill(pid, SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, SIGCONT)


def _family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]
