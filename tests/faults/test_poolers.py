"""Each part behind PgBouncer: it works where a pool keeps sessions, and one that lends them out is refused in one way.

docs/failover.md#poolers has the same table.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import psycopg
import pytest
import sqlalchemy as sa
from aio_pika.abc import AbstractChannel
from psycopg.sql import SQL, Identifier, Literal
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import create_async_engine

from outbox_spark import connection as spark
from relay.cli.exit_code import ExitCode
from relay.config.settings import BrokerSettings, ConsoleSettings, DatabaseSettings, Settings
from relay.console.serve import serve
from relay.consume import Consumer, Inbox, Message, on
from relay.consume.failed.queues import pool_topology, prepare
from relay.consume.pool import PartitionedConsumer
from relay.consume.pool.candidate import Candidate
from relay.engine.node import Node
from relay.errors import leaves
from relay.outbox import Event, add
from relay.publisher import DurablePublisher
from relay.retention.drop import Retention
from relay.servers.postgres.pooler import Lends, lends
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import free_port
from tests.cli.command import Command
from tests.cli.tree import TREE
from tests.consume.effects import EFFECTS, QUEUE, Queue, Table, count
from tests.consume.pool.conftest import candidate
from tests.consume.pool.partitions import Partitions
from tests.consume.sqlalchemy_handlers import HANDLERS, engine_url
from tests.publisher.events import NOWHERE, measured
from tests.support import pgbouncer
from tests.support.eventually import eventually
from tests.support.pgbouncer import PgBouncer, PoolMode
from tests.support.queues import declare_bound

pytestmark = pytest.mark.skipif(
    not pgbouncer.is_installed(),
    reason="PgBouncer is not installed; as root, `tests/support/packages test` installs it",
)

LENT_OUT = (
    "leads to a pooler that lends sessions out between transactions. Locks, settings and prepared statements need one"
    " session: name the server itself, or a pool with pool_mode = session"
)


PENDING = "SELECT FROM outbox.message WHERE state = 'pending'"


@dataclass(frozen=True)
class Place:
    """The database of a test, directly and by way of a pooler, and the broker."""

    direct: str
    pooled: str
    broker: BrokerSettings

    @property
    def database(self) -> DatabaseSettings:
        return DatabaseSettings(url=SecretStr(self.pooled))


Part = Callable[[Place], Awaitable[None]]


@on("Counted")
def count_in_thread(message: Message, connection: psycopg.Connection) -> None:
    connection.execute(
        "INSERT INTO effect (message_id, key, number) VALUES (%s, %s, %s)",
        (message.message_id, message.aggregate_id, message.json()),
    )


async def work_until(run: Awaitable[None], stop: Callable[[], None], condition: Callable[[], Any], what: str) -> None:
    """Run a part until the condition holds, and stop it; its error is raised at once."""
    running = asyncio.ensure_future(run)
    seeing = asyncio.ensure_future(eventually(condition, what))
    try:
        await asyncio.wait([running, seeing], return_when=asyncio.FIRST_COMPLETED)
        stop()
        await running
        await seeing
    finally:
        seeing.cancel()


@asynccontextmanager
async def client_of(place: Place) -> AsyncIterator[tuple[AbstractChannel, Table]]:
    async with (
        await psycopg.AsyncConnection.connect(place.direct, autocommit=True) as connection,
        await aio_pika.connect(place.broker.url.get_secret_value()) as client,
    ):
        await connection.execute(EFFECTS)
        yield await client.channel(), Table(connection)


async def applies(place: Place, target: Any, handler: Any) -> None:
    """Apply more messages than the driver sees of a statement before it prepares it."""
    async with client_of(place) as (channel, table):
        queue = Queue(channel)
        await queue.declare()
        await queue.send_all(range(20))
        consumer = Consumer(queue.name, [handler], inbox=Inbox(target, "projection"), broker=place.broker)
        await work_until(consumer.run(signals=False), consumer.stop, lambda: has_applied(table, 20), "it applies")


async def has_applied(table: Table, number: int) -> bool:
    return await table.numbers() == list(range(number))


async def consume(place: Place) -> None:
    await applies(place, place.database, count)


async def consume_in_threads(place: Place) -> None:
    await applies(place, place.database, count_in_thread)


def consume_by_engine(**options: Any) -> Part:
    async def part(place: Place) -> None:
        engine = sa.create_engine(engine_url(place.pooled), connect_args=options)
        try:
            await applies(place, engine, HANDLERS["connection"])
        finally:
            engine.dispose()

    return part


def consume_by_async_engine(**options: Any) -> Part:
    async def part(place: Place) -> None:
        engine = create_async_engine(engine_url(place.pooled), connect_args=options)
        try:
            await applies(place, engine, HANDLERS["async connection"])
        finally:
            await engine.dispose()

    return part


async def share(place: Place) -> None:
    """Work as a member of a pool, whose master is elsewhere."""
    await prepare(place.broker, "projection", pool_topology(QUEUE), may_declare=True)
    async with (
        client_of(place) as (channel, table),
        candidate(DatabaseSettings(url=SecretStr(place.direct)), "first"),
    ):
        await Partitions(channel, QUEUE).send(range(20))
        member = PartitionedConsumer(QUEUE, [count], inbox=Inbox(place.database, "projection"), broker=place.broker)
        await work_until(member.run(signals=False), member.stop, lambda: has_applied(table, 20), "it applies")


async def be_master(place: Place) -> None:
    standing = Candidate(place.database, "first")
    with psycopg.connect(place.direct, autocommit=True) as connection:
        await work_until(
            standing.run(),
            standing.stopping.set,
            lambda: connection.execute("SELECT FROM outbox.pool_master").fetchone() is not None,
            "it is the master",
        )


async def publish(place: Place) -> None:
    """Write into the table, as the broker is unreachable."""
    async with DurablePublisher(place.database, broker=NOWHERE, name="sensors", embedded=False) as sensors:
        for number in range(20):
            await sensors.publish(measured(number))
    with psycopg.connect(place.direct) as connection:
        assert connection.execute("SELECT count(*) FROM outbox.message").fetchone() == (20,)


async def relay(place: Place) -> None:
    node = Node(Settings(database=place.database, broker=place.broker))
    async with await aio_pika.connect(place.broker.url.get_secret_value()) as client:
        await declare_bound(await client.channel(), "billing")
    with psycopg.connect(place.direct, autocommit=True) as connection:
        with connection.transaction():
            add(connection, Event("invoice", "1", "Issued", {}, routing_key="billing"))
        await work_until(
            node.run(), node.start_draining, lambda: connection.execute(PENDING).fetchone() is None, "it sends"
        )


async def serve_pages(place: Place) -> None:
    """Serve the console until it can answer; it looks at the database before that."""
    settings = Settings(
        database=place.database, broker=place.broker, console=ConsoleSettings(listen=f"127.0.0.1:{free_port()}")
    )
    shown = asyncio.Event()
    serving = asyncio.create_task(serve(settings, None, lambda _: shown.set()))
    showing = asyncio.create_task(shown.wait())
    await asyncio.wait([serving, showing], return_when=asyncio.FIRST_COMPLETED)
    showing.cancel()
    if shown.is_set():
        signal.raise_signal(signal.SIGTERM)
    await serving


async def drop_days(place: Place) -> None:
    async with Retention.open(place.database) as retention:
        assert await retention.take_lock()


async def spark_connects(place: Place) -> None:
    """Connect as the driver of Spark does before its tasks: a reader, a writer and each job begin so."""
    with closing(await asyncio.to_thread(spark.connect, spark.conninfo(place.pooled))) as connection:
        connection.execute("SELECT 1")


async def write(place: Place) -> None:
    """Write as an application does, on its connection."""
    async with await psycopg.AsyncConnection.connect(place.pooled, prepare_threshold=None) as connection:
        for number in range(20):
            await add(connection, measured(number))
            await connection.commit()


# What each part does behind a pooler that lends sessions out between transactions; it works behind any other.
WORKS, REFUSES = True, False
PARTS: dict[str, tuple[Part, bool]] = {
    "writer": (write, WORKS),
    "consumer": (consume, WORKS),
    "consumer in threads": (consume_in_threads, WORKS),
    "consumer with SQLAlchemy": (consume_by_engine(), REFUSES),
    "consumer with SQLAlchemy, unprepared": (consume_by_engine(prepare_threshold=None), WORKS),
    "consumer with async SQLAlchemy": (consume_by_async_engine(), REFUSES),
    "consumer with async SQLAlchemy, unprepared": (consume_by_async_engine(prepare_threshold=None), WORKS),
    "member of a pool": (share, WORKS),
    "publisher": (publish, WORKS),
    "master of pools": (be_master, REFUSES),
    "relay": (relay, REFUSES),
    "retention": (drop_days, REFUSES),
    "console": (serve_pages, REFUSES),
    "Spark": (spark_connects, REFUSES),
}
# Defaults of an application that shares the pool. If a part changed them in a session, the application would get that.
DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "IntervalStyle": "iso_8601",
    "statement_timeout": "3h",
    "idle_session_timeout": "3h",
}


@pytest.fixture
def pooler(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[PgBouncer]:
    with PgBouncer(postgres, request.param) as pooler:
        yield pooler


@pytest.fixture
def place(pooler: PgBouncer, database_url: str, broker: BrokerSettings) -> Place:
    with psycopg.connect(database_url, autocommit=True) as owner:
        for name, value in DEFAULTS.items():
            statement = SQL("ALTER DATABASE {} SET {} = {}")
            owner.execute(statement.format(Identifier(owner.info.dbname), Identifier(name), Literal(value)))
    return Place(database_url, pooler.url(database_url), broker)


@asynccontextmanager
async def strangers(url: str) -> AsyncIterator[None]:
    """Let other clients use the pool, so that a part gets another session in each transaction.

    The block begins when one of them has ended a transaction.

    Raises:
        AssertionError: at the end of the block, if a session of theirs has settings of the part.
    """
    stop = asyncio.Event()
    begun = asyncio.Event()
    seen: set[tuple[Any, ...]] = set()
    read = SQL("SELECT {}").format(
        SQL(", ").join(SQL("current_setting({})").format(Literal(name)) for name in DEFAULTS)
    )

    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=None) as connection:
            while not stop.is_set():
                async with connection.transaction():
                    seen.add(await (await connection.execute(read)).fetchone() or ())
                    await connection.execute("SELECT pg_sleep(0.002)")
                begun.set()

    async with asyncio.TaskGroup() as others:
        for number in range(4):
            others.create_task(work(), name=f"stranger-{number}")
        try:
            await asyncio.wait_for(begun.wait(), 30)
            yield
        finally:
            stop.set()
    assert seen == {tuple(DEFAULTS.values())}


@pytest.mark.parametrize("pooler", [PoolMode.SESSION], indirect=True)
@pytest.mark.parametrize("part", PARTS)
async def test_each_part_works_where_a_pooler_keeps_sessions(part: str, place: Place) -> None:
    work, _ = PARTS[part]

    await work(place)


@pytest.mark.parametrize("pooler", [PoolMode.TRANSACTION], indirect=True)
@pytest.mark.parametrize("part", PARTS)
async def test_each_part_works_or_refuses_where_a_pooler_lends_them(part: str, place: Place) -> None:
    """What works leaves no setting in a session of other clients; what refuses does so before its first statement."""
    work, works = PARTS[part]
    refused: list[str] = []

    async with strangers(place.pooled):
        try:
            await work(place)
        except Exception as error:  # each kind of error of a part
            refused = [str(each) for each in leaves(error)] if isinstance(error, ExceptionGroup) else [str(error)]

    if works:
        assert refused == []
    else:
        assert len(refused) == 1
        assert LENT_OUT in refused[0]


@pytest.mark.parametrize("pooler", [PoolMode.TRANSACTION], indirect=True)
def test_a_look_that_another_client_misleads_does_not_mislead_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = [psycopg.connect(place.pooled, autocommit=True, prepare_threshold=None) for _ in range(3)]
    with connections[0] as ours, connections[1] as other, connections[2] as stranger:
        begin, misleading = other.transaction, iter([True])

        @contextmanager
        def begin_late() -> Iterator[None]:
            """The first time, begin while a stranger has our process: it is free for us again, and not for `other`."""
            with ExitStack() as held:
                if next(misleading, False):
                    held.enter_context(stranger.transaction())
                with begin():
                    held.close()
                    yield

        monkeypatch.setattr(other, "transaction", begin_late)

        assert lends(ours, other) is Lends.BETWEEN_TRANSACTIONS


# What it cannot do without; no job, row or lane of that number need be there.
WHY = ["--why", "test"]
GIVEN = {
    "failures show": ["1"],
    "parked show": ["1"],
    "parked retry": ["--all"],
    "parked discard": ["--all", "--yes", *WHY],
    "parked edit": ["1", "--payload", "{file}", "--yes", *WHY],
    "parked archive": ["--all", *WHY],
    "parked restore": ["--all", *WHY],
    "quarantine show": ["1"],
    "quarantine reroute": ["1", "--to-exchange", "x", *WHY],
    "quarantine discard": ["1", "--yes", *WHY],
    "quarantine probe": ["1"],
    "quarantine pause": ["x", "{number}", *WHY],
    "quarantine resume": ["{number}"],
    "lanes pause": ["{number}", *WHY],
    "lanes resume": ["{number}"],
    "dead-letters retry": ["billing", "--all", *WHY],
    "dead-letters discard": ["billing", "--all", "--yes", *WHY],
    "held retry": ["--all", *WHY],
    "replay": ["--all"],
    "jobs show": ["1"],
    "jobs resume": ["1"],
    "jobs pause": ["1", *WHY],
    "jobs cancel": ["1", "--yes", *WHY],
    "batches show": ["app", "1"],
    "batches give-up": ["app", "1", "--yes", *WHY],
    "reconcile": ["--since", "1h"],
    "retention": ["--yes", *WHY],
}
# They ask no database, or (`doctor`) tell what stands between.
ASKING_NONE = {
    "doctor", "dead-letters list", "dead-letters show", "dead-letters export", "topology apply", "topology show",
    "console user add", "console user remove", "console user list", "console token add", "console token remove",
    "console token list", "config show", "config example", "config examples", "config alerts", "config dashboards",
    "config jobs", "config roles", "completion", "healthcheck", "events list", "events export", "events check",
}  # fmt: skip


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    file = tmp_path / "payload.json"
    file.write_text("{}")
    return file


def arguments_of(command: str, number: int, payload: Path) -> list[str]:
    """Return what the command line says; `number` is that of what a command changes."""
    return " ".join([command, *GIVEN.get(command, [])]).format(number=number, file=payload).split()


@pytest.mark.parametrize("pooler", [PoolMode.TRANSACTION], indirect=True)
def test_each_command_refuses_where_a_pooler_lends_sessions(place: Place, tmp_path: Path, payload: Path) -> None:
    command = Command(tmp_path, RELAY_DATABASE_URL=place.pooled, RELAY_BROKER_URL=place.broker.url.get_secret_value())
    others = {}

    for name in TREE:
        if name not in ASKING_NONE:
            refused = command(*arguments_of(name, 1, payload))
            if (refused.code, LENT_OUT in refused.err) != (ExitCode.USAGE, True):
                others[name] = refused

    assert others == {}


@pytest.mark.parametrize("pooler", [PoolMode.SESSION], indirect=True)
def test_each_command_works_where_a_pooler_keeps_sessions(place: Place, tmp_path: Path, payload: Path) -> None:
    """Directly and by way of the pooler it ends in the same way."""
    command = Command(tmp_path, RELAY_BROKER_URL=place.broker.url.get_secret_value())
    differing = {}

    for name in TREE:
        if name not in ASKING_NONE | {"run", "console", "pool run"}:  # these run until told; see PARTS
            directly = command(*arguments_of(name, 1, payload), RELAY_DATABASE_URL=place.direct)
            pooled = command(*arguments_of(name, 2, payload), RELAY_DATABASE_URL=place.pooled)
            if directly.code != pooled.code:
                differing[name] = (directly, pooled)

    assert differing == {}


def test_a_migration_through_an_exhausted_pooler_ends_with_words(
    postgres: PostgresServer, database_url: str, tmp_path: Path
) -> None:
    """All sessions of the pool are with other clients, which keep them."""
    with PgBouncer(postgres, PoolMode.SESSION, size=1) as pooler:
        url = pooler.url(database_url)
        command = Command(tmp_path, RELAY_DATABASE_URL=url)
        with psycopg.connect(url) as other:
            other.execute("SELECT 1")
            without_any = command.process("migrate", RELAY_DATABASE_COMMAND_TIMEOUT="1")
        with_one = command.process("migrate")

    assert (without_any.code, with_one.code) == (ExitCode.FAILED, ExitCode.FAILED)
    assert "the pooler in front of it has no free connection" in without_any.err
    assert "a pooler answers, and gives us no second connection" in with_one.err
