"""A pooler in database.url: one that lends out sessions is refused at the start, one that keeps them is used."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from relay.config.settings import Settings
from relay.errors import ConfigurationError, DatabaseUnavailableError
from relay.servers.postgres.database import connect_async, require_session
from relay.testing.servers.postgres import PostgresServer
from tests.cli.command import Command
from tests.faults.load import relaying, under_load
from tests.faults.relay_sessions import with_database
from tests.support import pgbouncer
from tests.support.pgbouncer import PgBouncer, PoolMode

pytestmark = pytest.mark.skipif(
    not pgbouncer.is_installed(),
    reason="PgBouncer is not installed; as root, `tests/support/packages test` installs it",
)

LENT_OUT = (
    "database.url (RELAY_DATABASE_URL) leads to a pooler that lends sessions out between transactions. Locks, settings"
    " and prepared statements need one session: name the server itself, or a pool with pool_mode = session"
)

StartPooler = Callable[..., PgBouncer]


@pytest.fixture
def start_pooler(postgres: PostgresServer) -> Iterator[StartPooler]:
    """`start_pooler(PoolMode.SESSION, size=2)` starts a pooler in front of the run's server."""
    with ExitStack() as running:
        yield lambda *args, **more: running.enter_context(PgBouncer(postgres, *args, **more))


@pytest.mark.parametrize("mode", [PoolMode.TRANSACTION, PoolMode.STATEMENT])
@pytest.mark.parametrize("command", ["run", "migrate", "replay --all", "parked retry --all"])
def test_a_pooler_that_lends_sessions_out_is_refused(
    start_pooler: StartPooler, settings: Settings, tmp_path: Path, mode: PoolMode, command: str
) -> None:
    """A pooler lends out sessions by transaction or statement; each command refuses it, with exit code 2."""
    url = start_pooler(mode).url(settings.database.url.get_secret_value())

    refused = Command(
        tmp_path,
        RELAY_DATABASE_URL=url,
        RELAY_BROKER_URL=settings.broker.url.get_secret_value(),
    ).process(*command.split())

    assert refused.code == 2
    if command == "run":
        (told,) = [json.loads(line) for line in refused.err.splitlines()]
        assert (told["event"], told["error"]) == ("relay.failed", LENT_OUT)
    else:
        assert refused.err == f"relay: {LENT_OUT}\n"


async def test_it_is_found_out_in_a_busy_pool(start_pooler: StartPooler, settings: Settings) -> None:
    """A pooler that lends out sessions is busy with other clients; the relay still recognises it each time."""
    pooler = start_pooler(PoolMode.TRANSACTION)
    url = pooler.url(settings.database.url.get_secret_value())
    database = with_database(settings, url).database
    stop = asyncio.Event()

    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=None) as connection:
            while not stop.is_set():
                await connection.execute("SELECT pg_sleep(0.0005)")

    async with asyncio.TaskGroup() as others:
        for number in range(5):
            others.create_task(work(), name=f"other-{number}")
        for _ in range(20):
            with pytest.raises(ConfigurationError, match="pool_mode = session"):
                await connect_async(database)
        stop.set()


@pytest.mark.drills
async def test_a_pool_without_a_second_session_is_waited_for(start_pooler: StartPooler, settings: Settings) -> None:
    """A pooler has no second session to give; the relay reports the database as unavailable, and so tries again."""
    pooler = start_pooler(PoolMode.SESSION, size=1)
    url = pooler.url(settings.database.url.get_secret_value())
    database = with_database(settings, f"{url}?connect_timeout=2").database

    async with await connect_async(database, is_lent=True) as connection:
        with pytest.raises(DatabaseUnavailableError, match="gives us no second connection"):
            await require_session(connection, database)


async def test_a_pooler_that_keeps_sessions_is_used(start_pooler: StartPooler, settings: Settings) -> None:
    """A pooler keeps a session for each client; the relay works through it under load."""
    url, broker_url = settings.database.url.get_secret_value(), settings.broker.url.get_secret_value()
    through_pooler = with_database(settings, start_pooler(PoolMode.SESSION).url(url))

    async with under_load(url, broker_url) as load, relaying(through_pooler):
        await load.comes_on()
        await load.finish()
