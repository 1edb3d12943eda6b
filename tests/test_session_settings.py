"""Every session that we open has our settings, whatever a role or the database has for other applications."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import aio_pika
import psycopg
import pytest
from psycopg.sql import SQL, Identifier, Literal

from outbox_spark import connection as spark
from relay.config.settings import Settings
from relay.console.database import Database
from relay.consume.apply.handlers import Handlers
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.transactions_factory import open_transactions
from relay.engine.node import Node
from relay.engine.session.session import LaneSession
from relay.operate.doctor.finding import Verdict
from relay.operate.doctor.run import examine
from relay.operate.schema.migrate import sqlalchemy_engine
from relay.operate.session import session
from relay.publisher.table_buffer import TableBuffer
from relay.retention.drop import Retention
from relay.servers.postgres.database import OWN_SETTINGS, connect, connect_async
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
    "client_encoding": "LATIN1",
    "TimeZone": "Asia/Kathmandu",
    "statement_timeout": "3h",
    "lock_timeout": "3h",
    "idle_in_transaction_session_timeout": "3h",
    "idle_session_timeout": "3h",
    "transaction_timeout": "3h",
    "search_path": "outbox",
}
# What the application's code in a session has from its role and its database.
OF_APPLICATIONS = (
    "TimeZone", "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "transaction_timeout",
    "search_path",
)  # fmt: skip
OURS = {**OWN_SETTINGS, "DateStyle": "ISO, DMY", "search_path": OTHERS["search_path"]}
OF_CONSUMERS = {**OURS, **{name: OTHERS[name] for name in OF_APPLICATIONS}}
OF_PUBLISHERS = {**OF_CONSUMERS, "idle_session_timeout": OTHERS["idle_session_timeout"]}
OF_SPARK = {**OURS, "TimeZone": OTHERS["TimeZone"]}
OF_RELAYS = {
    **OURS,
    "statement_timeout": "30s",
    "lock_timeout": "3s",
    "idle_in_transaction_session_timeout": "30s",
}
OF_COMMANDS = {**OURS, "statement_timeout": "30s"}
READ = SQL("SELECT {}").format(SQL(", ").join(SQL("current_setting({})").format(Literal(name)) for name in OTHERS))


@pytest.fixture(autouse=True)
def _others(database_url: str) -> None:
    """Let the database have other defaults, as an application of ours may want them."""
    with psycopg.connect(database_url, autocommit=True) as owner:
        for name, value in OTHERS.items():
            statement = SQL("ALTER DATABASE {} SET {} = {}")
            owner.execute(statement.format(Identifier(owner.info.dbname), Identifier(name), Literal(value)))


def of(connection: psycopg.Connection) -> dict[str, str]:
    return named(connection.execute(READ).fetchone())


def named(row: Sequence[Any] | None) -> dict[str, str]:
    return dict(zip(OTHERS, row or (), strict=True))


def test_the_defaults_are_others(database_url: str) -> None:
    assert OTHERS.keys() == OWN_SETTINGS.keys() | {"search_path"}
    with psycopg.connect(database_url) as stranger:
        assert of(stranger) == OTHERS


def test_of_commands_and_of_the_console(settings: Settings) -> None:
    console = Database(settings.database, settings.console)
    console.open()
    try:
        with session(settings.database) as command, console.session() as page, connect(settings.database) as plain:
            assert of(command.connection) == OF_COMMANDS
            assert of(page.connection) == {**OURS, "statement_timeout": "2s"}
            assert of(plain) == OURS
    finally:
        console.close()


def test_of_migrations(settings: Settings) -> None:
    with sqlalchemy_engine(settings.database).connect() as connection:
        assert named(connection.exec_driver_sql(READ.as_string()).one()) == OURS


async def test_of_a_relay_and_of_what_works_beside_it(settings: Settings) -> None:
    async with await connect_async(settings.database) as beside:
        assert named(await (await beside.execute(READ)).fetchone()) == OURS
    async with await LaneSession.open(settings.database) as lanes, lanes.use() as connection:
        assert named(await (await connection.execute(READ)).fetchone()) == OF_RELAYS


@pytest.mark.parametrize("is_async", [True, False])
async def test_of_a_consumer(settings: Settings, *, is_async: bool) -> None:
    transactions = open_transactions(Inbox(settings.database, "billing"), Handlers({}, is_async=is_async))
    await transactions.open()
    try:
        (row,) = await transactions.execute(READ)
    finally:
        await transactions.close()
    assert named(row) == OF_CONSUMERS


async def test_of_retention(settings: Settings) -> None:
    async with Retention.open(settings.database) as retention:
        row = await (await retention._connection.execute(READ)).fetchone()
    assert named(row) == {**OURS, "statement_timeout": "30min"}


async def test_of_a_publisher(settings: Settings) -> None:
    buffer = TableBuffer(settings, "billing", embedded=False)
    async with buffer._use() as connection:
        row = await (await connection.execute(READ)).fetchone()
        await connection.close()
    assert named(row) == OF_PUBLISHERS


def test_of_a_spark_driver_and_its_tasks(database_url: str) -> None:
    info = spark.conninfo(database_url)
    with spark.connect(info) as driver:
        assert of(driver) == OF_SPARK
    with closing(spark.connect_task(info)) as task, closing(task.cursor()) as cursor:
        cursor.execute(READ.as_string())
        found = named(cursor.fetchone())
    timeouts = [name for name in OTHERS if name.endswith("_timeout")]
    assert {name: found[name] for name in timeouts} == dict.fromkeys(timeouts, "0")


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
