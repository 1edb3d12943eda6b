"""The database goes down under a write and comes back: the batch is there once, at the latest after a rerun."""

import secrets
import signal
from collections.abc import Iterator

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import migrate
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import wait_for
from tests.spark.cluster.conftest import MakeStage
from tests.spark.cluster.driver import Driver, DriverError
from tests.spark.cluster.outcome import PARTITION, WAYS, WriteWay, assert_nothing_written, assert_written_once
from tests.spark.frames import LOADING, WAITING_FOR_LOCK, one

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]

Options = dict[str, str]
HOW = pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
# COMMIT runs the trigger, which waits for a lock that the test holds until the server goes down.
HOLD_COMMITS = """
    CREATE FUNCTION billing.wait() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock_shared(1);
            RETURN NULL;
        END
    $$;
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON billing.invoice DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION billing.wait();
    SELECT pg_advisory_lock(1)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


@pytest.fixture
def database_url(server: PostgresServer) -> str:
    url = server.create_database(f"restart_{secrets.token_hex(6)}")
    migrate(DatabaseSettings(url=SecretStr(url)))
    return url


@WAYS
@HOW
def test_while_tasks_load(
    driver: Driver,
    options: Options,
    connection: psycopg.Connection,
    server: PostgresServer,
    at_stage: MakeStage,
    way: WriteWay,
    how: signal.Signals,
) -> None:
    """PostgreSQL restarts while tasks load rows; at the latest a rerun has written each row once."""
    held = at_stage("loading", partition=way.partitions - 1)
    driver.save({**options, **way.options}, held.fault, way.partitions)
    held.wait_reached(driver)
    wait_for(lambda: one(connection, LOADING) >= 1, "rows are ingested", 120)

    server.stop(how)
    server.start()
    held.go_on()

    _assert_written_at_the_latest_by_a_rerun(driver, options, way)


@WAYS
@HOW
def test_while_the_server_is_at_a_commit(
    driver: Driver,
    options: Options,
    connection: psycopg.Connection,
    server: PostgresServer,
    way: WriteWay,
    how: signal.Signals,
) -> None:
    """PostgreSQL restarts in the middle of a commit; at the latest a rerun has written each row once."""
    connection.execute(HOLD_COMMITS)
    driver.save({**options, **way.options}, partitions=way.partitions)
    wait_for(lambda: one(connection, WAITING_FOR_LOCK) >= 1 or driver.is_answering(), "a COMMIT waits", 120)
    assert not driver.is_answering()

    server.stop(how)
    server.start()

    _assert_written_at_the_latest_by_a_rerun(driver, options, way)


def _assert_written_at_the_latest_by_a_rerun(driver: Driver, options: Options, way: WriteWay) -> None:
    try:
        driver.answer()
    except DriverError:
        with psycopg.connect(options["url"], autocommit=True) as connection:
            if way is not PARTITION:
                assert_nothing_written(connection)
        driver.save({**options, **way.options}, partitions=way.partitions)
        driver.answer()
    with psycopg.connect(options["url"], autocommit=True) as connection:
        assert_written_once(connection, way)
