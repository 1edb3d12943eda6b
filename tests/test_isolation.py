"""Every session that we open is READ COMMITTED, whatever the database's default is for its other applications."""

import psycopg
import pytest
from psycopg.sql import SQL

from outbox_spark import connection as spark
from relay.config.settings import Settings
from relay.console.database import Database
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.transactions_factory import open_transactions
from relay.engine.session.session import LaneSession
from relay.operate.schema.migrate import sqlalchemy_engine
from relay.operate.session import session
from relay.servers.postgres.database import connect, connect_async

SHOW = "SHOW transaction_isolation"


@pytest.fixture(autouse=True)
def _strict(database_url: str) -> None:
    """Make the database's default the strictest, as an application of ours may want it."""
    with psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(f"ALTER DATABASE {owner.info.dbname} SET default_transaction_isolation = 'serializable'")


def of(connection: psycopg.Connection) -> str:
    row = connection.execute(SHOW).fetchone()
    assert row is not None
    return str(row[0])


def test_the_default_is_another(database_url: str) -> None:
    with psycopg.connect(database_url) as stranger:
        assert of(stranger) == "serializable"


def test_of_commands_and_of_the_console(settings: Settings) -> None:
    console = Database(settings.database, settings.console)
    console.open()
    try:
        with session(settings.database) as tables, console.session() as page, connect(settings.database) as plain:
            assert [of(each) for each in (tables.connection, page.connection, plain)] == ["read committed"] * 3
    finally:
        console.close()


def test_of_migrations(settings: Settings) -> None:
    with sqlalchemy_engine(settings.database).connect() as connection:
        assert connection.exec_driver_sql(SHOW).scalar() == "read committed"


async def test_of_a_relay_and_of_what_works_beside_it(settings: Settings) -> None:
    async with await connect_async(settings.database) as beside:
        assert await (await beside.execute(SHOW)).fetchone() == ("read committed",)
    async with await LaneSession.open(settings.database) as lanes, lanes.use() as connection:
        assert await (await connection.execute(SHOW)).fetchone() == ("read committed",)


async def test_of_a_consumer(settings: Settings) -> None:
    transactions = open_transactions(Inbox(settings.database, "billing"))
    await transactions.open()
    try:
        assert await transactions.execute(SQL(SHOW).format()) == [("read committed",)]
    finally:
        await transactions.close()


def test_of_a_spark_driver(database_url: str) -> None:
    with spark.connect(spark.conninfo(database_url)) as driver:
        assert of(driver) == "read committed"
