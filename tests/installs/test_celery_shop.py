"""examples/celery_shop: its tests turn red for each mistake; a task whose worker dies is repeated, its event is not."""

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from pamqp.commands import Basic
from yarl import URL

from relay.config.settings import Settings
from relay.testing.servers.process import Process
from tests.engine.conftest import Outbox
from tests.examples.suites import FIRST, copy_of, mistake, run_suite
from tests.installs.conftest import Install
from tests.installs.orders import LINGER
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy, Way

pytestmark = [pytest.mark.installs, pytest.mark.timeout(300)]

EXAMPLE = "celery_shop"
TASKS = f"examples.{EXAMPLE}.tasks"
EXTRAS = ("relay", "sqlalchemy", "testing")
BESIDE = ("celery>=5.5,<6", "pytest>=9", "pytest-asyncio>=1.2")

WRITTEN = """\
    with sessions.begin() as session:
        # Another run of this task may be under way: then the INSERT waits until that one has committed or failed.
        is_new = session.scalar(new.on_conflict_do_nothing().returning(Order.id)) is not None
        if is_new:
            add(session, placed)
"""
EVENT_FIRST = """\
    with sessions.begin() as session:
        add(session, placed)
    with sessions.begin() as session:
        session.execute(new.on_conflict_do_nothing())
"""

# What is a mistake, the code it stands for, and the code with it.
MISTAKES = [
    ("the event is forgotten", "            add(session, placed)\n", "            pass\n"),
    ("the event is committed before the change", WRITTEN, EVENT_FIRST),
    ("a task that is not idempotent", "        if is_new:\n", "        if is_new or True:\n"),
    ("an order by chance, and not that of the task", "UUID(order)", "__import__('uuid').uuid4()"),
    ("another type", '@event("OrderPlaced"', '@event("OrderCreated"'),
    ("another key", 'key=("customer", "customer")', 'key=("order", "order")'),
    ("no second try", "autoretry_for=(OperationalError,), ", ""),
]
SEND_MANY = f"""
import sys
from {TASKS} import place_order

for line in sys.stdin:
    place_order.delay(line.strip(), 17, "9.90")
"""
MANY = 300
KILLED_AT = (20, 80, 140, 200)  # orders

ORDERS = 'SELECT id::text FROM "order"'
EVENTS = "SELECT payload ->> 'order' FROM outbox.message"
HOLD = """INSERT INTO "order" (id, customer, amount) VALUES (%s, 17, 9.90)"""
WAITING = """
    SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'INSERT INTO "order"%'
"""


@pytest.fixture(scope="module")
def python(install_into: Install, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_into(tmp_path_factory.mktemp(EXAMPLE), "newest", *EXTRAS, beside=BESIDE)


@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_its_tests_pass(versions: str, install: Install, servers: dict[str, str], tmp_path: Path) -> None:
    python = install(versions, *EXTRAS, beside=BESIDE)
    code, output = run_suite(copy_of(EXAMPLE, tmp_path), servers, python)

    assert code == 0, output
    assert "5 passed" in output


@pytest.mark.parametrize(("name", "right", "wrong"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_its_tests_see(
    name: str, right: str, wrong: str, python: Path, servers: dict[str, str], tmp_path: Path
) -> None:
    copy = copy_of(EXAMPLE, tmp_path)
    mistake(copy / "tasks.py", right, wrong)
    code, output = run_suite(copy, servers, python, FIRST)

    assert code == 1, output


class Shop:
    """Workers of the example, the tasks that they get, and what these have written."""

    def __init__(self, python: Path, folder: Path, settings: Settings, outbox: Outbox) -> None:
        self.folder = folder
        self.outbox = outbox
        self.broker_url = settings.broker.url.get_secret_value()
        self.database_url = settings.database.url.get_secret_value()
        self.workers: list[Process] = []
        self._python = python

    def environment(self, broker_url: str) -> dict[str, str]:
        return {**os.environ, "RELAY_DATABASE_URL": self.database_url, "RELAY_BROKER_URL": broker_url}

    async def start(self, *options: str, broker_url: str | None = None) -> Process:
        """Start a worker; return when its tables are there."""
        celery: list[str | Path] = [self._python, "-m", "celery", "--app", TASKS, "worker", "--loglevel", "INFO"]
        environment = self.environment(broker_url or self.broker_url)
        log = self.folder / f"worker-{len(self.workers)}"
        worker = Process([*celery, *options], log=log, environment=environment, folder=self.folder)
        self.workers.append(worker)
        await eventually(lambda: "ready." in log.read_text() or not worker.is_running(), "the worker is ready")
        assert worker.is_running(), worker.log_end()
        return worker

    def log(self) -> str:
        """Return what the last worker has logged."""
        return (self.folder / f"worker-{len(self.workers) - 1}").read_text()

    def send(self, *orders: str) -> None:
        subprocess.run(
            [self._python, "-c", SEND_MANY],
            env=self.environment(self.broker_url),
            cwd=self.folder,
            input="\n".join(orders),
            text=True,
            check=True,
        )

    async def values(self, statement: str) -> Counter[str]:
        rows = await (await self.outbox.connection.execute(statement.encode())).fetchall()
        return Counter(value for (value,) in rows)

    async def has_written(self, count: int) -> bool:
        return (await self.values(ORDERS)).total() >= count

    async def waits(self) -> bool:
        return (await self.outbox.connection.execute(WAITING.encode())).rowcount == 1


@pytest.fixture
def shop(python: Path, settings: Settings, outbox: Outbox, tmp_path: Path) -> Iterator[Shop]:
    copy_of(EXAMPLE, tmp_path)
    shop = Shop(python, tmp_path, settings, outbox)
    yield shop
    for worker in shop.workers:
        worker.stop(signal.SIGKILL)


@pytest.fixture
async def blocker(database_url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A transaction that lets a task wait in the middle of its transaction."""
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        yield connection
        await connection.rollback()


@pytest.mark.parametrize("killed", ["worker", "process of the pool"])
async def test_a_task_that_is_killed_in_its_transaction_runs_again_and_writes_one_event(
    killed: str, shop: Shop, blocker: psycopg.AsyncConnection
) -> None:
    worker, order = await shop.start("--concurrency", "1"), str(uuid4())
    await blocker.execute(HOLD, [order])
    await asyncio.to_thread(shop.send, order)
    await eventually(shop.waits, "the task is in its transaction")

    if killed == "worker":
        worker.stop(signal.SIGKILL)
        await shop.start("--concurrency", "1")
    else:
        os.kill(child_of(worker), signal.SIGKILL)
    await blocker.rollback()
    await eventually(lambda: shop.log().count(" succeeded in ") == 1, "the task is done")

    assert await shop.values(ORDERS) == await shop.values(EVENTS) == {order: 1}


async def test_a_task_whose_worker_dies_after_its_commit_runs_again_and_writes_one_event(shop: Shop) -> None:
    broker, order = URL(shop.broker_url), str(uuid4())
    async with FaultProxy(str(broker.host), int(broker.port or 0)) as proxy:
        behind = str(broker.with_host("127.0.0.1").with_port(proxy.port))
        worker = await shop.start("--concurrency", "1", broker_url=behind)
        proxy.hold(Way.UP)  # no acknowledgement arrives
        await asyncio.to_thread(shop.send, order)
        await proxy.wait_seen(Way.UP, Basic.Ack, 1)
        assert await shop.values(ORDERS) == {order: 1}
        worker.stop(signal.SIGKILL)

    await shop.start("--concurrency", "1")
    await eventually(lambda: shop.log().count(" succeeded in ") == 1, "the task has run again")

    assert await shop.values(ORDERS) == await shop.values(EVENTS) == {order: 1}


async def test_sigterm_lets_a_task_end(shop: Shop, blocker: psycopg.AsyncConnection) -> None:
    worker, order = await shop.start("--concurrency", "1"), str(uuid4())
    await blocker.execute(HOLD, [order])
    await asyncio.to_thread(shop.send, order)
    await eventually(shop.waits, "the task is in its transaction")

    worker.tell(signal.SIGTERM)
    await eventually(lambda: "Warm shutdown" in shop.log(), "the worker has heard it")
    await blocker.rollback()
    await eventually(lambda: not worker.is_running(), "the worker ends")

    assert worker.returncode == 0, worker.log_end()
    assert await shop.values(ORDERS) == await shop.values(EVENTS) == {order: 1}


async def test_each_task_writes_its_order_and_one_event_though_workers_are_killed(shop: Shop) -> None:
    orders = [str(uuid4()) for _ in range(MANY)]
    worker = await shop.start("--concurrency", "2")
    await shop.outbox.connection.execute(LINGER)
    await asyncio.to_thread(shop.send, *orders)
    for count in KILLED_AT:
        await eventually(partial(shop.has_written, count), f"{count} orders are written")
        worker.stop(signal.SIGKILL)
        worker = await shop.start("--concurrency", "2")
    await eventually(partial(shop.has_written, MANY), "all orders are written")
    worker.stop(signal.SIGTERM)

    assert await shop.values(ORDERS) == await shop.values(EVENTS) == Counter(orders)


def child_of(process: Process) -> int:
    """Return the id of the only process of a worker's pool."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)
