"""The relay's database session is ended, refused, blocked, cancelled: nothing is lost, repeated or blamed on a row."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, LiteralString

import aio_pika
import psycopg
import pytest
from aio_pika.abc import AbstractQueue
from psycopg.sql import SQL, Identifier
from pydantic import SecretStr
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings, RelaySettings, Settings
from relay.engine.session.session import LaneSession
from relay.operate.schema.migrate import migrate
from relay.servers.postgres.database import kind_of_loss
from relay.testing.servers.postgres import PostgresServer
from tests.faults.load import relaying, under_load
from tests.faults.relay_sessions import RELAY_SESSIONS, reasons, with_database
from tests.support.events import Events
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Way
from tests.support.queues import declare_bound

WRITE = "INSERT INTO outbox.message (aggregate_type, event_type, payload) VALUES ('customer', 'InvoiceIssued', '1')"
BLOCK_MARKS = "LOCK TABLE outbox.message_sent IN SHARE MODE"
RELAY_WAITS = f"SELECT {RELAY_SESSIONS} AND wait_event_type = 'Lock'"
RELAY_WAITS_LONG = f"{RELAY_WAITS} AND clock_timestamp() - query_start > interval '1800 ms'"
RELAY_RESTS = f"SELECT {RELAY_SESSIONS} AND state = 'idle' AND clock_timestamp() - state_change > interval '1800 ms'"
RELAY_WAITS_FOR_STANDBY = f"SELECT {RELAY_SESSIONS} AND wait_event = 'SyncRep'"
PENDING = "SELECT count(*) FROM outbox.message WHERE state = 'pending'"
# Longer than they would take, shorter than the relay waits or rests.
IMPATIENT = {
    "statement_timeout": "1500ms",
    "lock_timeout": "1500ms",
    "transaction_timeout": "1500ms",
    "idle_session_timeout": "1500ms",
}


class Operator:
    """A session of an operator, which the settings for other sessions do not affect."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self.connection = connection

    async def tell(self, query: LiteralString) -> Any:
        row = await (await self.connection.execute(query)).fetchone()
        return row[0] if row else None

    async def finds(self, query: LiteralString) -> bool:
        return bool((await self.connection.execute(query)).rowcount)

    async def set_for_new_sessions(self, **values: str) -> None:
        database = Identifier(self.connection.info.dbname)
        for name, value in values.items():
            await self.connection.execute(
                SQL("ALTER DATABASE {} SET {} = {}").format(database, Identifier(name), value)
            )

    async def set_for_server(self, **values: str) -> None:
        for name, value in values.items():
            await self.connection.execute(SQL("ALTER SYSTEM SET {} = {}").format(Identifier(name), value))
        await self.tell("SELECT pg_reload_conf()")

    async def is_sent(self) -> bool:
        return bool(await self.tell(PENDING) == 0)


@pytest.fixture
async def operator(database_url: str) -> AsyncIterator[Operator]:
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        yield Operator(connection)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL that the test may restart."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_database_url(server: PostgresServer) -> Iterator[str]:
    """A migrated database on the server that may be restarted."""
    name = "outbox"
    url = server.create_database(name)
    migrate(DatabaseSettings(url=SecretStr(url)))
    yield url
    server.drop_database(name)


@pytest.fixture
async def queue(broker_url: str) -> AsyncIterator[AbstractQueue]:
    """A queue that gets every message of the relay."""
    async with await aio_pika.connect(broker_url) as connection:
        yield await declare_bound(await connection.channel(), "events")


async def test_sessions_ended_by_an_operator_under_load(settings: Settings, operator: Operator) -> None:
    """An operator ends the relay's sessions under load; no message is lost or repeated."""
    url, broker_url = settings.database.url.get_secret_value(), settings.broker.url.get_secret_value()
    with capture_logs() as events:
        async with under_load(url, broker_url) as load, relaying(settings):
            for _ in range(4):
                await load.comes_on()
                await operator.tell(f"SELECT pg_terminate_backend(pid) {RELAY_SESSIONS}")
            await load.comes_on()
            await load.finish()

    # Not always with the server's words: a session that ends with a statement unread is reset, and they are gone.
    assert "session lost: " in reasons(events)
    assert load.repeats == 0  # what was confirmed is marked on the next session


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
async def test_a_restart_of_the_server_under_load(
    settings: Settings, server: PostgresServer, own_database_url: str, broker_url: str, how: signal.Signals
) -> None:
    """PostgreSQL restarts under load; the relay tries until it is back, and repeats no message."""
    with capture_logs() as events:
        async with (
            under_load(own_database_url, broker_url) as load,
            relaying(with_database(settings, own_database_url)),
        ):
            await load.comes_on()
            await asyncio.to_thread(server.stop, how)
            await eventually(lambda: "refused" in reasons(events), "it has tried in vain to come back")
            server.start()
            await load.comes_on()
            await load.finish()

    assert load.repeats == 0


@pytest.mark.drills
async def test_a_server_that_falls_silent_under_load(settings: Settings, database_url: str, broker_url: str) -> None:
    """The database stops answering under load; the relay gives up its session in time, and repeats no message."""
    with capture_logs() as events:
        async with proxied(settings.database, command_timeout=1.0) as (proxy, far):
            silent = settings.model_copy(update={"database": far})
            async with under_load(database_url, broker_url) as load, relaying(silent):
                await load.comes_on()
                for way in Way:
                    proxy.hold(way)
                await eventually(lambda: "no answer within 1 s" in reasons(events), "it gives the session up", 30)
                proxy.cut()
                for way in Way:
                    proxy.release(way)
                await load.comes_on()
                await load.finish()

    assert load.repeats == 0


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("pg_terminate_backend", "session lost: terminating connection due to administrator command"),
        ("pg_cancel_backend", "canceling statement due to user request"),
    ],
)
async def test_a_row_confirmed_but_not_marked_is_marked_later_and_not_sent_again(
    settings: Settings, operator: Operator, database_url: str, queue: AbstractQueue, end: LiteralString, told: str
) -> None:
    """A mark waits for a lock, and its session or statement is ended; the row is marked later and not sent again."""
    with capture_logs() as events:
        async with relaying(settings):
            async with await psycopg.AsyncConnection.connect(database_url) as blocker:
                await blocker.execute(BLOCK_MARKS)
                await operator.connection.execute(WRITE)
                await eventually(lambda: operator.finds(RELAY_WAITS), "it waits for the lock")

                await operator.tell(f"SELECT {end}(pid) {RELAY_SESSIONS}")
                await eventually(lambda: told in reasons(events), "PostgreSQL's words are told")
                await eventually(lambda: operator.finds(RELAY_WAITS), "it waits for the lock again")
            await eventually(operator.is_sent, "the row is marked")

    assert await queue.get() is not None
    assert await queue.get(fail=False) is None


async def test_the_server_s_last_words_are_known_when_they_come_with_an_answer(
    settings: Settings, operator: Operator
) -> None:
    """PostgreSQL ends a session along with an answer; the reason of the loss is known all the same."""
    async with await LaneSession.open(settings.database) as session, session.use() as connection:
        await operator.tell(f"SELECT pg_terminate_backend(pid) {RELAY_SESSIONS}")
        await eventually(lambda: has_heard(connection, session), "they have come")

        with pytest.raises(psycopg.OperationalError) as failed:
            await connection.execute("SELECT")

    assert failed.value.sqlstate is None
    assert kind_of_loss(session.ended_by or failed.value) == "admin_shutdown"


def has_heard(connection: psycopg.AsyncConnection, session: LaneSession) -> bool:
    """Whether the end of the session was heard, after reading as the driver does at the end of an answer."""
    connection.pgconn.consume_input()
    connection.pgconn.notifies()
    return session.ended_by is not None


async def test_timeouts_that_an_operator_sets_for_everyone_do_not_end_a_session(
    settings: Settings, operator: Operator, database_url: str, queue: AbstractQueue
) -> None:
    """An operator sets short timeouts for all sessions; the relay's session outlives them."""
    await operator.set_for_new_sessions(**IMPATIENT)
    calm = RelaySettings(poll_interval=10, heartbeat_interval=10)
    patient = " ".join(f"-c {name}=0" for name in IMPATIENT)
    with capture_logs() as events:
        async with relaying(settings.model_copy(update={"relay": calm})):
            await eventually(lambda: operator.finds(RELAY_RESTS), "it has been idle for longer than others may")
            async with await psycopg.AsyncConnection.connect(database_url, options=patient) as blocker:
                await blocker.execute(BLOCK_MARKS)
                await operator.connection.execute(WRITE)
                await eventually(lambda: operator.finds(RELAY_WAITS_LONG), "it waits for longer than others may")
            await eventually(operator.is_sent, "the row is marked")

    assert reasons(events) == ""


async def test_a_server_that_takes_no_writes_is_waited_for(
    settings: Settings, operator: Operator, queue: AbstractQueue
) -> None:
    """All sessions become read-only; the relay names the reason, and goes on once writes are allowed."""
    with capture_logs() as events:
        async with relaying(settings):
            await operator.set_for_new_sessions(default_transaction_read_only="on")
            await operator.tell(f"SELECT pg_terminate_backend(pid) {RELAY_SESSIONS}")
            await eventually(lambda: "session is read-only" in reasons(events), "the reason is told")
            await operator.set_for_new_sessions(default_transaction_read_only="off")
            await operator.connection.execute(WRITE)
            await eventually(operator.is_sent, "the row is sent")

    assert await queue.get() is not None


async def test_a_session_that_turns_read_only_is_replaced(
    settings: Settings, server: PostgresServer, own_database_url: str, broker_url: str
) -> None:
    """A running session becomes read-only, as on managed servers with a full disk; the relay replaces it."""
    async with await psycopg.AsyncConnection.connect(own_database_url, autocommit=True) as connection:
        operator = Operator(connection)
        await connection.execute("SET default_transaction_read_only = off")
        with capture_logs() as events:
            async with relaying(with_database(settings, own_database_url)):
                await operator.set_for_server(default_transaction_read_only="on")
                await eventually(lambda: "read-only transaction" in reasons(events), "the reason is told")
                await operator.set_for_server(default_transaction_read_only="off")
                await eventually(lambda: healed(events), "it goes on")


async def test_a_commit_that_its_standby_may_lack_is_not_taken_for_made(
    settings: Settings, server: PostgresServer, own_database_url: str, queue: AbstractQueue
) -> None:
    """A mark is cancelled while it waits for a standby; the relay names the doubt, marks again, and repeats nothing."""
    async with await psycopg.AsyncConnection.connect(own_database_url, autocommit=True) as connection:
        operator = Operator(connection)
        await connection.execute("SET synchronous_commit = local")
        with capture_logs() as events:
            async with relaying(with_database(settings, own_database_url)):
                await operator.set_for_server(synchronous_standby_names="nobody")
                await connection.execute(WRITE)
                await eventually(lambda: operator.finds(RELAY_WAITS_FOR_STANDBY), "it waits for a standby")

                await operator.tell(f"SELECT pg_cancel_backend(pid) {RELAY_SESSIONS}")
                await eventually(lambda: "a failover may undo the commit" in reasons(events), "the doubt is told")
                await operator.set_for_server(synchronous_standby_names="")
                await eventually(operator.is_sent, "the row is sent")

    assert await queue.get() is not None
    assert await queue.get(fail=False) is None


async def test_both_ends_notice_a_peer_that_died_silently(settings: Settings, database_url: str) -> None:
    """A peer may die silently; client and server both have TCP keepalives and a user timeout that notice it."""
    own = settings.database.model_copy(update={"url": SecretStr(f"{database_url}?keepalives_idle=7")})
    async with await LaneSession.open(own) as session, session.use() as connection:
        cursor = await connection.execute("SELECT name, setting FROM pg_settings WHERE name LIKE 'tcp_%'")
        server = dict(await cursor.fetchall())
        with socket.socket(fileno=os.dup(connection.fileno())) as ours:
            client = {
                "tcp_keepalives_idle": ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                "tcp_keepalives_interval": ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                "tcp_keepalives_count": ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                "tcp_user_timeout": ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            }

    assert client == {
        "tcp_keepalives_idle": 7,
        "tcp_keepalives_interval": 2,
        "tcp_keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    assert server == {name: str(value) for name, value in client.items()}


def healed(events: Events) -> bool:
    told = [event["event"] for event in events if event["event"].startswith("database.")]
    return told[-1:] == ["database.healed"]
