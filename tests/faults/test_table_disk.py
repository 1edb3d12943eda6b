"""The database's disk is full: the relay waits, burns no attempt, and goes on by itself when there is room."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from relay.testing.servers.postgres import PostgresServer
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.support.eventually import eventually
from tests.support.template import template_of
from tests.support.volume import fill

WINDOW = 400
LARGE = '"' + "x" * 4000 + '"'


@pytest.fixture
def database_url(postgres: PostgresServer, volume: Path) -> Iterator[str]:
    """A database whose tables are on the volume. The WAL is elsewhere, so that the server lives on."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.admin_url, autocommit=True) as admin:
        admin.execute(f"CREATE TABLESPACE {name} LOCATION '{volume}'".encode())
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {template_of(postgres)} TABLESPACE {name}".encode())
        yield postgres.url(name)
        postgres.drop_database(name)
        admin.execute(f"DROP TABLESPACE {name}".encode())


async def test_a_full_disk_delays_the_marks_burns_nothing_and_repeats_nothing(
    outbox: Outbox, volume: Path, queue: Reader, run_node: RunNode
) -> None:
    """The database's disk is full; the relay marks later, burns no attempt, and repeats nothing."""
    await outbox.insert_many(3000, payload=LARGE)
    ballast = fill(volume)

    async with run_node(max_window_rows=WINDOW, **NO_SWEEP) as node:
        await eventually(lambda: "No space left" in node.hindrances().get("database", ""), "it says what is full")
        await eventually(lambda: node.in_flight == 0, "all that was sent is confirmed")
        assert await outbox.ids("pending")
        ballast.unlink()

        await eventually(outbox.is_empty, "everything is marked", 60)
        await eventually(lambda: not node.hindrances(), "all is well again")
        assert not node.snapshot().database_losses  # it waited on its session, lanes and all

    assert await outbox.ids("sent") == sorted(await queue.ids(3000))
    cursor = await outbox.connection.execute("SELECT max(attempts) FROM outbox.message")
    assert await cursor.fetchone() == (0,)
