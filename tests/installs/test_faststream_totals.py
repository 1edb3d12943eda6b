"""examples/faststream_totals: its tests turn red for each mistake, and kills neither lose nor repeat an effect.

A consumer of `relay.consume` in an application of FastStream ends with it.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from aio_pika import Message
from aio_pika.abc import AbstractChannel

from relay.config.settings import Settings
from relay.testing.servers.process import Process
from tests.engine.conftest import Outbox, RunNode
from tests.examples.elsewhere import drill_totals
from tests.examples.suites import FIRST, copy_of, mistake, run_suite
from tests.installs.conftest import Install
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

pytestmark = [pytest.mark.installs, pytest.mark.timeout(300)]

EXAMPLE = "faststream_totals"
PROGRAMS = Path(__file__).with_name("programs")
BESIDE = ("faststream[rabbit,cli]>=0.6,<0.8", "psycopg[binary,pool]", "pytest>=9", "pytest-asyncio>=1.2")
COMMAND = ("-m", "faststream", "run", "--factory", f"examples.{EXAMPLE}.app:make_app")

# What is a mistake, the code it stands for, and the code with it.
MISTAKES = [
    ("a handler that is not idempotent", "    if is_new:\n", "    if is_new or True:\n"),
    ("the id is committed before the effect", "    if is_new:\n", "    await connection.commit()\n    if is_new:\n"),
    ("another key", '"x-aggregate-id"', '"x-aggregate-type"'),
    ("another type", 'raw_message.type == "InvoiceIssued"', 'raw_message.type == "InvoiceCreated"'),
    ("acknowledged before the effect", "AckPolicy.REJECT_ON_ERROR", "AckPolicy.ACK_FIRST"),
    ("given up while the database is away", "await asyncio.sleep(RETRY_AFTER)", "raise"),
]


@pytest.fixture(scope="module")
def python(install_into: Install, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_into(tmp_path_factory.mktemp(EXAMPLE), "newest", "relay", "testing", beside=BESIDE)


@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_its_tests_pass(versions: str, install: Install, servers: dict[str, str], tmp_path: Path) -> None:
    python = install(versions, "relay", "testing", beside=BESIDE)
    code, output = run_suite(copy_of(EXAMPLE, tmp_path), servers, python)

    assert code == 0, output
    assert "5 passed" in output


@pytest.mark.parametrize(("name", "right", "wrong"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_its_tests_see(
    name: str, right: str, wrong: str, python: Path, servers: dict[str, str], tmp_path: Path
) -> None:
    copy = copy_of(EXAMPLE, tmp_path)
    mistake(copy / "app.py", right, wrong)
    code, output = run_suite(copy, servers, python, FIRST)

    assert code == 1, output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_application_and_our_consumer(
    number: signal.Signals,
    python: Path,
    channel: AbstractChannel,
    settings: Settings,
    outbox: Outbox,
    run_node: RunNode,
    tmp_path: Path,
) -> None:
    await declare_bound(channel, "billing")
    urls = {"BROKER_URL": settings.broker.url, "DATABASE_URL": settings.database.url}
    environment = {name: url.get_secret_value() for name, url in urls.items()}
    log = tmp_path / "log"
    command = [str(python), "-m", "faststream", "run", "--factory", "beside_faststream:make_app"]
    process = Process(command, log=log, environment={**os.environ, **environment}, folder=PROGRAMS)
    try:
        await asyncio.to_thread(process.wait_until, lambda: "FastStream app started" in log.read_text(), 60)
        await outbox.insert()
        async with run_node(settings):
            await eventually(lambda: "applied" in log.read_text(), "our consumer applies")
        await channel.default_exchange.publish(Message(b"a message"), "theirs")
        await eventually(lambda: "took a message" in log.read_text(), "the subscriber gets its message")
    finally:
        await asyncio.to_thread(process.stop, number)

    assert process.returncode == 0, process.log_end()
    assert '"consumer.stopped"' in log.read_text()


async def test_each_message_has_its_effect_once_and_in_order_through_kills(
    python: Path, outbox: Outbox, channel: AbstractChannel, settings: Settings, run_node: RunNode, tmp_path: Path
) -> None:
    copy_of(EXAMPLE, tmp_path)

    def start(environment: Mapping[str, str]) -> Process:
        return Process([python, *COMMAND], log=tmp_path / "log", environment=environment, folder=tmp_path)

    await drill_totals(start, outbox, channel, settings, run_node)
