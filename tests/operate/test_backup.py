"""The steps of docs/backup.md: a dump is restored into a new server, and the consumer's database knows more."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aio_pika
import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume import Consumer, Inbox
from relay.servers.postgres.database import connect_async
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import run
from tests.cli.command import Command
from tests.consume.effects import CONSUMER, EFFECTS, QUEUE, Table, count, running
from tests.support.eventually import eventually
from tests.support.given import given_postgres
from tests.support.queues import declare_bound

pytestmark = [pytest.mark.drills, pytest.mark.timeout(600)]

INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    VALUES ('counter', 'a', 'Counted', %s)
"""
LOGIN = "CREATE ROLE relay LOGIN PASSWORD 'restored'; GRANT outbox_relay, outbox_retention TO relay"
ONE_DAY_MORE = "SELECT outbox.ensure_sent_days((now() AT TIME ZONE 'UTC')::date - 1, 1)"
PENDING = "SELECT count(*) FROM outbox.message WHERE state = 'pending'"


@pytest.fixture
def new_server() -> Iterator[PostgresServer]:
    if given_postgres():
        pytest.skip("the programs of a given server are not known")
    with PostgresServer() as server:
        yield server


def write(url: str, number: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(INSERT, [str(number)])


@asynccontextmanager
async def relaying(relay: Command, url: str) -> AsyncIterator[None]:
    """Run a relay until the end of the block and until no row is pending, and stop it."""
    with Command(relay.folder, **{**relay.variables, "RELAY_DATABASE_URL": url}).start("run") as process:
        yield
        async with await connect_async(DatabaseSettings(url=SecretStr(url))) as connection:

            async def is_empty() -> bool:
                return await (await connection.execute(PENDING)).fetchone() == (0,)

            await eventually(is_empty, "nothing is pending", 60)
        process.terminate()
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 0, said


async def test_a_restored_outbox_sends_again_and_reconcile_names_what_is_gone(
    postgres: PostgresServer,
    new_server: PostgresServer,
    database_url: str,
    inbox_url: str,
    broker: BrokerSettings,
    broker_url: str,
    tmp_path: Path,
) -> None:
    """An outbox is restored from a dump; pending rows go out again, and `relay reconcile` names what it lacks."""
    relay = Command(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url)
    dump = tmp_path / "outbox.dump"
    shop = DatabaseSettings(url=SecretStr(inbox_url))
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(ONE_DAY_MORE)  # so that it is judged what is applied just after midnight
    async with (
        await aio_pika.connect(broker_url) as broker_connection,
        await connect_async(shop) as shop_connection,
    ):
        await declare_bound(await broker_connection.channel(), QUEUE)
        await shop_connection.execute(EFFECTS)
        effects = Table(shop_connection)
        consumer = Consumer(QUEUE, [count], inbox=Inbox(shop, CONSUMER), broker=broker)
        async with running(consumer):
            write(database_url, 1)
            async with relaying(relay, database_url):
                await eventually(lambda: consumer.counters.applied == 1, "the first is applied", 60)
            write(database_url, 2)  # pending in the dump, sent after it
            await asyncio.to_thread(back_up, postgres, database_url, dump)
            write(database_url, 3)  # not in the dump, and sent
            async with relaying(relay, database_url):
                await eventually(lambda: consumer.counters.applied == 3, "all are applied", 60)

            restored = await asyncio.to_thread(restore, new_server, dump)
            migrated = relay.process("migrate", RELAY_DATABASE_URL=restored)
            with psycopg.connect(restored, autocommit=True) as connection:
                connection.execute(relay.process("config", "roles").out.encode())
                connection.execute(LOGIN)
            write(restored, 4)
            login = new_server.url("restored", user="relay", password="restored")
            async with relaying(relay, login):
                await eventually(lambda: consumer.counters.applied == 4, "the new one is applied", 60)

        compared = relay.process("reconcile", "--since", "1d", "--inbox", inbox_url, RELAY_DATABASE_URL=login)

        assert migrated.code == 0, migrated.err
        assert sorted(await effects.numbers()) == [1, 2, 3, 4]
    assert consumer.counters.duplicates == 1
    assert compared.code == 1
    assert f"1 in the inbox of {CONSUMER} without a row in the table, applied from " in compared.err
    assert "A restore of an earlier state" in compared.err
    assert "not in the inbox" not in compared.err


def back_up(server: PostgresServer, url: str, dump: Path) -> None:
    """Back up as docs/backup.md says."""
    run([server.program("pg_dump"), "--format=custom", f"--file={dump}", url])


def restore(server: PostgresServer, dump: Path) -> str:
    """Restore as docs/backup.md says, and return the URL."""
    url = server.create_database("restored")
    run([server.program("pg_restore"), "--exit-on-error", "--no-owner", "--no-acl", f"--dbname={url}", dump])
    return url
