"""The disk of the write-ahead log is full: PostgreSQL ends, and the relay waits until it is back."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings, Settings
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer
from tests.faults.load import relaying, under_load
from tests.support.eventually import eventually
from tests.support.volume import fill

# It ends at its failure, rather than to recover and fail again until there is room, and takes little room until then.
SMALL = {
    "restart_after_crash": "off",
    "shared_buffers": "16MB",
    "min_wal_size": "32MB",
    "max_wal_size": "32MB",
    "wal_recycle": "off",
}


@pytest.fixture
def server(volume: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL with all of its files on the volume."""
    with PostgresServer(folder=volume / "server", durable=True, settings=SMALL) as server:
        yield server


@pytest.mark.drills
@pytest.mark.parametrize("volume", ["256m"], indirect=True)
async def test_a_server_that_dies_of_a_full_disk_is_waited_for(
    server: PostgresServer, volume: Path, settings: Settings, broker_url: str
) -> None:
    """PostgreSQL ends because its WAL volume is full; the relay waits for the restart, and repeats no message."""
    url = server.create_database("drill")
    theirs = settings.model_copy(update={"database": DatabaseSettings(url=SecretStr(url))})
    await asyncio.to_thread(migrate, theirs.database)
    async with under_load(url, broker_url) as load, relaying(theirs) as node:
        await load.comes_on()

        ballast = fill(volume)
        await eventually(lambda: asyncio.to_thread(is_ended_by_the_log, server), "the server ends", 60)
        await eventually(lambda: "database" in node.hindrances(), "the relay says so")
        ballast.unlink()
        server.start()

        await load.comes_on(60)
        await load.finish(60)
    assert load.repeats == 0  # what was confirmed is kept in mind until it is marked


def is_ended_by_the_log(server: PostgresServer) -> bool:
    """Whether the server has ended, after a request for the log's next file, which has no room."""
    with suppress(psycopg.Error), psycopg.connect(server.admin_url, autocommit=True) as connection:
        connection.execute("SELECT pg_switch_wal()")
    return not server.is_running()
