"""The connection is lost at the COMMIT of the driver's transaction: the batch is there once, or not at all.

The proxy stands between Spark and the database; rows are counted past it.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark import commit
from outbox_spark.load import load
from outbox_spark.pieces import write_piece
from outbox_spark.plan import Staged
from outbox_spark.prepare import prepare
from outbox_spark.result import Outcome
from tests.spark.frames import WAITING_FOR_LOCK, counts, invoices, one, save, staging_tables
from tests.spark.releases import SAVE_FAILS, arrow_table
from tests.support.eventually import eventually
from tests.support.proxy import Act, FaultProxy, Way

BATCH = {"txnAppId": "nightly", "txnVersion": "7"}
WRITTEN = (100, 100, 1)
# A deferred trigger runs inside the COMMIT, which so lasts for as long as the test holds the lock. The server does not
# look whether its client is there, as it does not while it waits for its disk or for a standby.
STOP_IN_COMMIT = """
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM set_config('client_connection_check_interval', '0', true);
        PERFORM pg_advisory_xact_lock(7);
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON billing.invoice DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.invoice_id = 'INV-40') EXECUTE FUNCTION wait();
    SELECT pg_advisory_lock(7);
"""
GO_ON = "SELECT pg_advisory_unlock(7)"
IN_COMMIT = WAITING_FOR_LOCK + " AND query = 'COMMIT'"
# The transaction's last statement before the COMMIT drops the staging table.
STOP_BEFORE_COMMIT = """
    CREATE FUNCTION wait() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock(7); END';
    CREATE EVENT TRIGGER wait ON ddl_command_start WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION wait();
    SELECT pg_advisory_lock(7);
"""
BEFORE_COMMIT = """
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'outbox-spark' AND datname = current_database()
        AND state = 'idle in transaction' AND query LIKE 'DROP TABLE%'
"""


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[FaultProxy]:
    """What the writer takes for the database."""
    url = urlsplit(database_url)
    async with FaultProxy(url.hostname or "", url.port or 0, amqp=False) as between:
        yield between


@pytest.fixture
def through_proxy(options: dict[str, str], proxy: FaultProxy) -> dict[str, str]:
    """Options of a good write over the proxy."""
    url = urlsplit(options["url"])
    return {**options, **BATCH, "url": options["url"].replace(f":{url.port}/", f":{proxy.port}/")}


async def test_a_commit_that_is_never_answered_is_found_in_the_ledger(
    spark: SparkSession, through_proxy: dict[str, str], connection: psycopg.Connection, proxy: FaultProxy
) -> None:
    connection.execute(STOP_IN_COMMIT)
    saving = _start_saving(spark, through_proxy)
    await _reach(saving, connection, IN_COMMIT)

    proxy.hold(Way.DOWN)
    connection.execute(GO_ON)
    await eventually(lambda: counts(connection) == WRITTEN, "it is committed")
    proxy.cut(Act.RESET)
    proxy.release(Way.DOWN)
    await saving

    assert staging_tables(connection) == []
    await _start_saving(spark, through_proxy)
    assert counts(connection) == WRITTEN


async def test_a_commit_that_the_server_is_still_at_is_waited_for(
    spark: SparkSession, through_proxy: dict[str, str], connection: psycopg.Connection, proxy: FaultProxy
) -> None:
    connection.execute(STOP_IN_COMMIT)
    saving = _start_saving(spark, through_proxy)
    await _reach(saving, connection, IN_COMMIT)

    proxy.cut(Act.RESET)
    await eventually(lambda: one(connection, WAITING_FOR_LOCK) == 2 or saving.done(), "the writer asks the ledger")
    connection.execute(GO_ON)
    await saving

    assert counts(connection) == WRITTEN
    assert staging_tables(connection) == []


async def test_a_commit_that_never_reaches_the_server_writes_nothing_and_says_to_run_again(
    spark: SparkSession, through_proxy: dict[str, str], connection: psycopg.Connection, proxy: FaultProxy
) -> None:
    connection.execute(STOP_BEFORE_COMMIT)
    saving = _start_saving(spark, through_proxy)
    await _reach(saving, connection, WAITING_FOR_LOCK)

    proxy.hold(Way.UP)
    connection.execute(GO_ON)
    await _reach(saving, connection, BEFORE_COMMIT)
    proxy.cut(Act.RESET)
    proxy.release(Way.UP)
    with pytest.raises(SAVE_FAILS) as refused:
        await saving

    words = str(outbox_spark.reason(refused.value))
    assert words.startswith("nothing of the batch was written: ")
    assert words.endswith("; run it again")
    assert counts(connection) == (0, 0, 0)
    assert staging_tables(connection) == []
    await _start_saving(spark, through_proxy)
    assert counts(connection) == WRITTEN


async def test_a_database_that_does_not_answer_after_the_commit_leaves_it_unknown(
    spark: SparkSession,
    through_proxy: dict[str, str],
    connection: psycopg.Connection,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit, "ASK_AGAIN_FOR", 1.0)
    frame = invoices(spark)
    through_proxy = {name: value for name, value in through_proxy.items() if name not in BATCH}
    plan, _ = await asyncio.to_thread(prepare, through_proxy, frame.schema, overwrite=False)
    rows = await asyncio.to_thread(lambda: arrow_table(frame).to_batches())
    staged = await asyncio.to_thread(load, plan, rows, partition=0, attempt=0)
    connection.execute(STOP_IN_COMMIT)
    committing = asyncio.create_task(asyncio.to_thread(commit.commit_batch, [(plan, [staged])]))
    await _reach(committing, connection, IN_COMMIT)

    proxy.refusing = True
    proxy.cut(Act.RESET)
    with pytest.raises(outbox_spark.CommitUnknownError) as unknown:
        await committing
    connection.execute(GO_ON)
    await eventually(lambda: counts(connection) == WRITTEN, "it is committed")
    proxy.refusing = False

    name = re.search(r"txnAppId '(\S+)' and txnVersion 0: it is", str(unknown.value))
    assert name is not None
    await _start_saving(spark, {**through_proxy, "txnAppId": name[1], "txnVersion": "0"})
    assert counts(connection) == WRITTEN
    assert staging_tables(connection) == []


@pytest.mark.parametrize("manner", [{}, {"singleTask": "true"}], ids=["staged", "single-task"])
async def test_tasks_wait_for_a_database_that_is_away(
    spark: SparkSession,
    through_proxy: dict[str, str],
    connection: psycopg.Connection,
    proxy: FaultProxy,
    manner: dict[str, str],
) -> None:
    frame = invoices(spark)
    plan, _ = await asyncio.to_thread(prepare, {**through_proxy, **manner}, frame.schema, overwrite=False)
    rows = await asyncio.to_thread(lambda: arrow_table(frame).to_batches())

    def write() -> Staged:
        if plan.pieces is None:
            return load(plan, rows, partition=0, attempt=0)
        return write_piece(plan, plan.pieces, rows, partition=0, attempt=0)

    proxy.refusing = True
    writing = asyncio.create_task(asyncio.to_thread(write))
    await eventually(lambda: proxy.refused >= 3 or writing.done(), "the task tries again")
    proxy.refusing = False
    staged = await writing
    if plan.pieces is None:
        proxy.refusing = True
        committing = asyncio.create_task(asyncio.to_thread(commit.commit_batch, [(plan, [staged])]))
        await eventually(lambda: proxy.refused >= 6 or committing.done(), "the commit tries again")
        proxy.refusing = False
        assert (await committing).outcome is Outcome.WRITTEN

    assert counts(connection)[:2] == (100, 100)


async def test_a_piece_whose_commit_is_never_answered_is_found_in_the_ledger(
    spark: SparkSession, through_proxy: dict[str, str], connection: psycopg.Connection, proxy: FaultProxy
) -> None:
    connection.execute(STOP_IN_COMMIT)
    saving = _start_saving(spark, {**through_proxy, "singleTask": "true"})
    await _reach(saving, connection, IN_COMMIT)

    proxy.cut(Act.RESET)
    await eventually(lambda: one(connection, WAITING_FOR_LOCK) == 2 or saving.done(), "the next attempt waits for it")
    connection.execute(GO_ON)
    await saving

    assert counts(connection) == (100, 100, 1 + 2)


def _start_saving(spark: SparkSession, options: dict[str, str]) -> "asyncio.Task[None]":
    def write() -> None:
        # Spark looks up a data source in the thread's active session: this call makes ours that.
        spark.createDataFrame([], "unused int")
        save(invoices(spark, partitions=1), options)

    return asyncio.create_task(asyncio.to_thread(write))


async def _reach(writing: "asyncio.Task[Any]", connection: psycopg.Connection, sessions: str) -> None:
    """Return once one session is there; at once with the error when the writing ends before."""
    await eventually(lambda: writing.done() or one(connection, sessions) == 1, sessions, 60)
    assert not writing.done(), await writing
