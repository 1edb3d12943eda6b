"""A server is replaced by one of a newer release with the commands of docs/blue-green.md, as they stand there."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aio_pika
import psycopg
import pytest

from relay.config.settings import Settings
from relay.consume import Consumer, Inbox, Message, on
from relay.engine.node import Node
from relay.operate.doctor.finding import Finding, Verdict
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer, installed
from tests.console.filled import fill
from tests.consume.effects import running
from tests.doctor.findings import at, look
from tests.faults.load import relaying, under_load
from tests.faults.relay_sessions import with_database
from tests.prose.pages import programs
from tests.support.eventually import eventually
from tests.support.queues import declare_bound
from tests.support.releases import NEWEST, OLDEST

pytestmark = pytest.mark.timeout(600)

PREPARE, COPY, AWAIT_COPY, CATCH_UP, END, SET_SEQUENCES, TAKE_BACK = range(7)  # the commands of the page
NOWHERE = "postgresql://127.0.0.1:1/nowhere"
RATE = 300  # messages a second

END_SESSIONS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
ROLLED_BACK = "SELECT nextval('outbox.message_id_seq') FROM generate_series(1, 20)"
TABLES = """
    SELECT relname FROM pg_class
    WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r'
    ORDER BY relname
"""
SUM = "SELECT count(*), md5(string_agg(row::text, ',' ORDER BY row::text)) FROM outbox.{} AS row"
SAVED_IN = "SELECT DISTINCT saved_in FROM outbox.lane_floor"


@dataclass
class Move:
    """Two databases, on a server of the oldest release and one of the newest, and the commands that lead there."""

    blue: str
    green: str
    programs: str  # the folder with those of blue's release

    async def run(self, step: int) -> None:
        """Run one step of the page; it must not fail."""
        command = programs("docs/blue-green.md", "sh")[step]
        environment = {**os.environ, "BLUE": self.blue, "GREEN": self.green}
        environment["PATH"] = f"{self.programs}:{environment['PATH']}"
        shell = await asyncio.create_subprocess_exec("bash", "-euo", "pipefail", "-c", command, env=environment)
        assert await asyncio.wait_for(shell.wait(), 120) == 0, command

    def tables(self, url: str) -> dict[str, tuple[int, str]]:
        """Return how many rows each table of the outbox has, and a checksum of them."""
        with psycopg.connect(url) as connection:
            names = [name for (name,) in connection.execute(TABLES).fetchall()]
            return {name: connection.execute(SUM.format(name).encode()).fetchall()[0] for name in names}


@pytest.fixture
def move() -> Iterator[Move]:
    if OLDEST not in installed():
        pytest.skip(f"PostgreSQL {OLDEST} is not installed; as root, `tests/support/packages test` installs it")
    with PostgresServer(OLDEST, settings={"wal_level": "logical"}) as old, PostgresServer(NEWEST) as new:
        blue = old.create_database("app")
        migrate(at(blue).database)
        yield Move(blue, new.create_database("app"), str(old.program("psql").parent))


@on("InvoiceIssued")
async def apply(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute("INSERT INTO applied VALUES (%s)", [message.message_id])  # fails when it is applied twice


@asynccontextmanager
async def consuming(settings: Settings) -> AsyncIterator[None]:
    inbox = Inbox(settings.database, "ledger")
    async with running(Consumer("ledger", [apply], inbox=inbox, broker=settings.broker)):
        yield


async def found(settings: Settings, check: str) -> list[Finding]:
    return await asyncio.to_thread(look, settings, check)


def execute(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


@pytest.mark.drills
async def test_a_server_is_replaced_under_writers_relay_and_consumer(
    move: Move, settings: Settings, broker_url: str
) -> None:
    """The relay of the old server is killed, all moves to the new one: nothing is lost, reordered or applied twice."""
    blue, green = with_database(settings, move.blue), with_database(settings, move.green)
    execute(move.blue, "CREATE TABLE applied (message_id uuid PRIMARY KEY)")
    async with under_load(move.blue, broker_url, rate=RATE) as load, await aio_pika.connect(broker_url) as broker:
        await declare_bound(await broker.channel(), "ledger")
        async with consuming(blue):
            relay = asyncio.create_task(Node(blue).run())
            await load.comes_on(60)
            for step in (PREPARE, COPY, AWAIT_COPY):
                await move.run(step)
            await load.comes_on(60)
            await eventually(lambda: execute(move.blue, SAVED_IN) != [], "the relay has saved its floors", 30)
            relay.cancel()
            await asyncio.wait([relay])
            load.url = NOWHERE
            execute(move.blue, ROLLED_BACK)
        execute(move.blue, END_SESSIONS)
        await move.run(CATCH_UP)
        assert move.tables(move.green) == move.tables(move.blue)
        assert (await found(green, "database.subscriptions"))[0].verdict == Verdict.FAILED
        await move.run(END)
        assert (await found(green, "database.sequences"))[0].words.startswith("the sequence is below the highest id: ")
        await move.run(SET_SEQUENCES)
        await move.run(TAKE_BACK)
        for check in ("database.sequences", "database.subscriptions", "database.history", "database.foreign"):
            assert [each.verdict for each in await found(green, check)] == [Verdict.OK]
        of_blue = execute(move.green, SAVED_IN)

        load.url = move.green
        async with relaying(green), consuming(green):
            await load.comes_on(60)
            await load.finish(120)

            async def is_applied() -> bool:
                applied = execute(move.green, "SELECT count(*) FROM applied")
                return applied == [(len(load.delivered),)]

            await eventually(is_applied, "each message is applied", 60)
            await eventually(lambda: execute(move.green, SAVED_IN) != of_blue, "the relay saves its floors", 30)
    assert len(of_blue) == 1


@pytest.mark.drills
async def test_every_table_of_the_outbox_comes_over(move: Move) -> None:
    """Every table has rows: after the copy the new server has the same ones, and says where a sequence is behind."""
    fill(move.blue)
    for step in (PREPARE, COPY, AWAIT_COPY, CATCH_UP, END):
        await move.run(step)

    here = move.tables(move.blue)
    assert move.tables(move.green) == here
    behind = {each.words.split()[7] for each in await found(at(move.green), "database.sequences")}
    assert {"outbox.message_id_seq", "outbox.replay_id_seq", "outbox.operator_audit_id_seq"} <= behind
    await move.run(SET_SEQUENCES)
    assert [each.verdict for each in await found(at(move.green), "database.sequences")] == [Verdict.OK]
