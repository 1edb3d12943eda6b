"""examples/node: its tests turn red for each mistake; kills of writer and consumer neither lose nor repeat anything."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from uuid import uuid4

import pytest
from aio_pika.abc import AbstractChannel

from relay.config.settings import Settings
from relay.testing.servers.process import Process
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.examples.elsewhere import drill_totals
from tests.examples.suites import FIRST, copy_of, mistake, run_suite
from tests.installs.orders import LINGER
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

pytestmark = [
    pytest.mark.installs,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("npm") is None, reason="npm is not installed; as root, `tests/support/packages node` installs it"
    ),
]

# What is a mistake, the program, the code it stands for, and the code with it.
MISTAKES = [
    ("the event is forgotten", "writer.mjs", "if (rowCount === 1) {", "if (rowCount === 9) {"),
    (
        "the event is committed before the change",
        "writer.mjs",
        "const { rowCount }",
        'await client.query(EVENT, [customer, "{}"]); await client.query("COMMIT"); const { rowCount }',
    ),
    ("a writer that is not idempotent", "writer.mjs", "if (rowCount === 1) {", "if (true) {"),
    ("events of another key", "writer.mjs", "[String(customer), ", "[order, "),
    ("events of another type", "writer.mjs", "'OrderPlaced'", "'OrderCreated'"),
    ("a consumer that is not idempotent", "consumer.mjs", "rowCount === 1 && ", ""),
    ("totals of another key", "consumer.mjs", '"x-aggregate-id"', '"x-aggregate-type"'),
    ("totals of another type", "consumer.mjs", '"InvoiceIssued"', '"InvoiceCreated"'),
    ("the id is committed before the effect", "consumer.mjs", 'await client.query("BEGIN");', ""),
    (
        "given up while the database is away",
        "consumer.mjs",
        "await setTimeout(RETRY_AFTER);",
        "return channel.nack(message, false, false);",
    ),
]
TABLE = 'CREATE TABLE "order" (id uuid PRIMARY KEY, customer bigint, amount numeric)'
ORDERS = 300
KILLED_AT = (20, 60, 100, 140, 180, 220)  # orders


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages that the example's lock names."""
    copy = copy_of("node", tmp_path_factory.mktemp("node"))
    subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=copy, check=True, timeout=200)
    return copy / "node_modules"


@pytest.fixture
def copy(modules: Path, tmp_path: Path) -> Path:
    copy = copy_of("node", tmp_path)
    (copy / "node_modules").symlink_to(modules)
    return copy


def test_its_tests_pass(copy: Path, servers: dict[str, str]) -> None:
    code, output = run_suite(copy, servers)

    assert code == 0, output
    assert "7 passed" in output


@pytest.mark.parametrize(("name", "file", "right", "wrong"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_its_tests_see(name: str, file: str, right: str, wrong: str, copy: Path, servers: dict[str, str]) -> None:
    mistake(copy / file, right, wrong)
    code, output = run_suite(copy, servers, sys.executable, FIRST)

    assert code == 1, output


async def test_each_message_has_its_effect_once_and_in_order_through_kills(
    outbox: Outbox, channel: AbstractChannel, settings: Settings, run_node: RunNode, copy: Path, tmp_path: Path
) -> None:
    def start(environment: Mapping[str, str]) -> Process:
        return Process(["node", "consumer.mjs"], log=tmp_path / "log", environment=environment, folder=copy)

    await drill_totals(start, outbox, channel, settings, run_node)


async def test_each_order_is_published_once_and_in_order_though_its_writer_is_killed(
    outbox: Outbox, channel: AbstractChannel, settings: Settings, run_node: RunNode, copy: Path, tmp_path: Path
) -> None:
    reader = Reader(channel, await declare_bound(channel, "shop.orders"))
    await outbox.connection.execute(f"{TABLE}; {LINGER}")
    orders = [{"order": str(uuid4()), "customer": n % 7, "amount": str(n + 1)} for n in range(ORDERS)]
    (copy / "orders").write_text("".join(f"{json.dumps(order)}\n" for order in orders))
    environment = {**os.environ, "DATABASE_URL": settings.database.url.get_secret_value()}

    def start() -> Process:
        command = ["sh", "-c", "exec node writer.mjs <orders"]
        return Process(command, log=tmp_path / "log", environment=environment, folder=copy)

    async def has_written(count: int) -> bool:
        assert writer.is_running(), writer.log_end()
        return (await outbox.connection.execute("SELECT FROM outbox.message")).rowcount >= count

    async with run_node():
        for count in KILLED_AT:
            writer = start()
            await eventually(partial(has_written, count), f"{count} orders are written")
            writer.stop(signal.SIGKILL)
        writer = start()
        await eventually(lambda: not writer.is_running(), "the writer ends")
        assert writer.returncode == 0, writer.log_end()
        messages = await reader.drain(ORDERS)

    assert {message.type for message in messages} == {"OrderPlaced"}
    keys = [(message.headers["x-aggregate-id"], json.loads(message.body)) for message in messages]
    assert [key for key, order in keys if key != str(order["customer"])] == []
    assert by_customer([order for _, order in keys]) == by_customer(orders)


def by_customer(orders: list[dict[str, object]]) -> dict[object, list[dict[str, object]]]:
    """Return the orders of each customer, in the given order."""
    ordered = sorted(orders, key=lambda order: str(order["customer"]))
    return {customer: list(theirs) for customer, theirs in groupby(ordered, key=lambda order: order["customer"])}
