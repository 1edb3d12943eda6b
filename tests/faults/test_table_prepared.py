"""Writers with two-phase commit: prepared rows outlive a restart and go out when they are committed, never else."""

import re
import secrets
from collections.abc import Iterator

import psycopg
import pytest
from pydantic import SecretStr

from relay.config.settings import DatabaseSettings
from relay.operate import holders
from relay.operate.schema.migrate import migrate
from relay.operate.status import read_status
from relay.servers.postgres.tables import Tables
from relay.testing.servers.postgres import PostgresServer
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.engine.follower import insert
from tests.support.eventually import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL that allows prepared transactions, and that the test restarts."""
    with PostgresServer(settings={"max_prepared_transactions": "20"}) as server:
        migrate(DatabaseSettings(url=SecretStr(server.create_database("migrated"))))
        yield server


@pytest.fixture
def database_url(server: PostgresServer) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    url = server.create_database(name, template="migrated")
    yield url
    with psycopg.connect(url, autocommit=True) as connection:  # a test that failed may have left some
        left = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall()
        for (gid,) in left:
            connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())
    server.drop_database(name)


async def prepare(url: str, gid: str, key: str, *, rows: int = 1) -> list[int]:
    """Write rows and prepare their transaction; return their ids."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute("SET LOCAL outbox.ring = off")
        ids = [await insert(connection, key) for _ in range(rows)]
        await connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())
        await connection.commit()
    return ids


async def decide(url: str, how: str, gid: str) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f"{how} PREPARED '{gid}'".encode())


async def test_a_writer_can_prepare_while_a_relay_sleeps(
    outbox: Outbox, database_url: str, queue: Reader, run_node: RunNode
) -> None:
    """A writer prepares a transaction while a relay sleeps; after COMMIT PREPARED its row arrives."""
    async with run_node(**NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        await eventually(outbox.has_sleeping_relay, "asks writers to ring")

        (id_,) = await prepare(database_url, "order-7", "1")
        await decide(database_url, "COMMIT", "order-7")

        assert await queue.ids(1) == [id_]


async def test_a_writer_that_lets_it_ring_is_told_why_it_cannot_prepare(
    outbox: Outbox, writer: psycopg.AsyncConnection, run_node: RunNode
) -> None:
    """A writer prepares without `outbox.ring = off`; PostgreSQL refuses, and names NOTIFY as the reason."""
    async with run_node() as node:
        await eventually(node.is_ready, "ready")
        await eventually(outbox.has_sleeping_relay, "asks writers to ring")
        await insert(writer, "1")

        with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
            await writer.execute("PREPARE TRANSACTION 'loud'")


async def test_prepared_rows_outlive_a_crash_and_go_out_only_when_they_are_committed(
    outbox: Outbox, server: PostgresServer, database_url: str, queue: Reader, run_node: RunNode
) -> None:
    """PostgreSQL crashes with prepared transactions; their rows arrive after their commit, and only then."""
    async with run_node(**NO_SWEEP) as node:
        await eventually(node.is_ready, "ready")
        expected = await prepare(database_url, "committed before", "1", rows=3)
        later = await prepare(database_url, "committed after", "2", rows=3)
        await prepare(database_url, "rolled back before", "3")
        await prepare(database_url, "rolled back after", "4")
        await outbox.insert_many(6000)  # so that the prepared ones lie far behind
        await decide(database_url, "COMMIT", "committed before")
        await decide(database_url, "ROLLBACK", "rolled back before")
        await eventually(outbox.is_empty, "the others are sent", 60)

        server.crash()
        server.start()
        await outbox.connection.close()
        outbox.connection = await psycopg.AsyncConnection.connect(database_url, autocommit=True)
        expected += await outbox.ids("sent")
        expected.append(await outbox.insert("5"))
        await eventually(outbox.is_empty, "the relay is back", 60)
        await decide(database_url, "COMMIT", "committed after")
        await decide(database_url, "ROLLBACK", "rolled back after")
        expected += later

        messages = await queue.drain(6000 + 7, within=60)
    sent = [int(str(message.headers["x-outbox-id"])) for message in messages]
    assert set(sent) == set(expected)
    assert [id_ for id_ in sent if id_ in later] == later
    await outbox.connection.close()


async def test_an_orphan_is_named_by_status_with_its_gid_and_age(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prepared transaction is forgotten; `relay status` names it with its gid and age until it is decided."""
    monkeypatch.setattr(holders, "HELD_LONG", 0.0)
    await prepare(database_url, "orphan of billing", "1")

    with psycopg.connect(database_url, autocommit=True) as connection:
        reasons = read_status(Tables(connection, "outbox"), progress_timeout=0.1).reasons
        await decide(database_url, "ROLLBACK", "orphan of billing")
        afterwards = read_status(Tables(connection, "outbox"), progress_timeout=0.1).reasons

    words = r"prepared transaction orphan of billing \(postgres\) has kept dead rows from being cleared away for \d+ s"
    assert [reason for reason in reasons if re.fullmatch(words, reason)]
    assert not [reason for reason in afterwards if "orphan" in reason]


async def test_a_prepared_transaction_that_has_a_lane_is_named_as_such(outbox: Outbox, database_url: str) -> None:
    """A transaction that took a lane's lock is prepared; no session has it, and the status says what ends it."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await connection.execute(
            "INSERT INTO outbox.node (name, backend_pid, lanes, version) SELECT 'first', 1, array_agg(lane), '1'"
            " FROM generate_series(1, 15) AS lane"
        )
        await connection.commit()
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext('outbox.lane'), 0)")
        await connection.execute(b"PREPARE TRANSACTION 'strange'")
        await connection.commit()
    with psycopg.connect(database_url) as reader:
        (reason,) = read_status(Tables(reader, "outbox"), progress_timeout=0.1).reasons
    await decide(database_url, "ROLLBACK", "strange")

    assert reason == (
        "no relay holds lane 0: a prepared transaction has its lock; ROLLBACK PREPARED ends it, see pg_prepared_xacts"
    )
