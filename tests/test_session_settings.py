"""Every session that we open has our settings, whatever a role or the database has for other applications."""

import asyncio
from pathlib import Path

import aio_pika
import psycopg
import pytest
from psycopg.sql import SQL, Identifier, Literal

from outbox_spark import connection as spark
from relay.config.settings import Settings
from relay.console.database import Database
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.transactions_factory import open_transactions
from relay.engine.node import Node
from relay.engine.session.session import LaneSession
from relay.operate.doctor.finding import Verdict
from relay.operate.doctor.run import examine
from relay.operate.schema.migrate import sqlalchemy_engine
from relay.operate.session import session
from relay.servers.postgres.database import SESSION_SETTINGS, connect, connect_async
from tests.cli.command import Command
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

OTHERS = {
    "default_transaction_isolation": "serializable",
    "DateStyle": "German, DMY",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "-15",
    "array_nulls": "off",
    "standard_conforming_strings": "off",
}
READ = SQL("SELECT {}").format(SQL(", ").join(SQL("current_setting({})").format(Literal(name)) for name in OTHERS))
OURS = ("read committed", "ISO, DMY", "postgres", "1", "on", "on")


@pytest.fixture(autouse=True)
def _others(database_url: str) -> None:
    """Let the database have other defaults, as an application of ours may want them."""
    with psycopg.connect(database_url, autocommit=True) as owner:
        for name, value in OTHERS.items():
            statement = SQL("ALTER DATABASE {} SET {} = {}")
            owner.execute(statement.format(Identifier(owner.info.dbname), Identifier(name), Literal(value)))


def of(connection: psycopg.Connection) -> tuple[str, ...]:
    row = connection.execute(READ).fetchone()
    assert row is not None
    return row


def test_the_defaults_are_others(database_url: str) -> None:
    assert OTHERS.keys() == SESSION_SETTINGS.keys()
    with psycopg.connect(database_url) as stranger:
        assert of(stranger) == tuple(OTHERS.values())


def test_of_commands_and_of_the_console(settings: Settings) -> None:
    console = Database(settings.database, settings.console)
    console.open()
    try:
        with session(settings.database) as command, console.session() as page, connect(settings.database) as plain:
            assert [of(each) for each in (command.connection, page.connection, plain)] == [OURS] * 3
    finally:
        console.close()


def test_of_migrations(settings: Settings) -> None:
    with sqlalchemy_engine(settings.database).connect() as connection:
        assert tuple(connection.exec_driver_sql(READ.as_string()).one()) == OURS


async def test_of_a_relay_and_of_what_works_beside_it(settings: Settings) -> None:
    async with await connect_async(settings.database) as beside:
        assert await (await beside.execute(READ)).fetchone() == OURS
    async with await LaneSession.open(settings.database) as lanes, lanes.use() as connection:
        assert await (await connection.execute(READ)).fetchone() == OURS


async def test_of_a_consumer(settings: Settings) -> None:
    transactions = open_transactions(Inbox(settings.database, "billing"))
    await transactions.open()
    try:
        assert await transactions.execute(READ) == [OURS]
    finally:
        await transactions.close()


def test_of_a_spark_driver(database_url: str) -> None:
    with spark.connect(spark.conninfo(database_url)) as driver:
        assert of(driver) == OURS


def test_of_the_doctor(settings: Settings) -> None:
    """It may have a lent session, so it sets them for each transaction alone."""
    findings = examine(settings)
    assert [finding for finding in findings if finding.part == "database" and finding.verdict is Verdict.SKIPPED] == []


async def test_a_relay_sends_and_commands_read(settings: Settings, broker_url: str, tmp_path: Path) -> None:
    """What they read has times, intervals and arrays."""
    url = settings.database.url.get_secret_value()
    relay = Command(tmp_path, RELAY_DATABASE_URL=url, RELAY_BROKER_URL=broker_url)
    rows, node = Rows(url), Node(settings)
    async with await aio_pika.connect(broker_url) as connection:
        await declare_bound(await connection.channel(), "billing")
    sent = rows.pending()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.run())
        await eventually(lambda: rows.states()[sent][0] == "sent", "the row is sent")
        node.start_draining()
    rows.parked()
    rows.connection.close()

    for command in (
        ("status",),
        ("doctor",),
        ("parked", "list"),
        ("failures",),
        ("replay", "--since", "1h", "--dry-run"),
    ):
        shown = await asyncio.to_thread(relay.process, *command)
        assert shown.code == 0, shown
