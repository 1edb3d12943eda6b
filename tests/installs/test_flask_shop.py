"""examples/flask_shop: its tests turn red for each mistake; no event is lost or made up when gunicorn's workers die."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest
from aio_pika.abc import AbstractChannel

from relay.config.settings import Settings
from relay.testing.servers.process import Process, free_port, is_listening, run
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.examples.suites import FIRST, copy_of, mistake, run_suite
from tests.installs.conftest import Install
from tests.installs.orders import LINGER
from tests.support.eventually import eventually
from tests.support.queues import declare_bound

pytestmark = [pytest.mark.installs, pytest.mark.timeout(300)]

EXAMPLE = "flask_shop"
APPLICATION = f"examples.{EXAMPLE}.app:make_app()"
EXTRAS = ("relay", "sqlalchemy", "testing")
BESIDE = ("flask>=3,<4", "gunicorn>=23", "packaging", "pytest>=9", "pytest-asyncio>=1.2")

ADD = "    add(session, OrderPlaced(order=order, customer=new.customer, amount=new.amount))\n"

# What is a mistake, the code it stands for, and the code with it.
MISTAKES = [
    ("the event is forgotten", ADD, ""),
    ("the event is committed before the change", ADD, f"{ADD}    session.commit()\n"),
    ("another type", '@event("OrderPlaced"', '@event("OrderCreated"'),
    ("another key", 'version=1, key=("customer", "customer")', 'version=1, key=("order", "order")'),
    ("an order that is another one each time", "place_order(session, order, ", "place_order(session, uuid4(), "),
    ("what is seen is forgotten", "        publisher.publish(seen)\n", ""),
]
REQUESTS = 240
CLIENTS = 6
KILLED_AT = (30, 70, 110, 150, 190)  # answers


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
    mistake(copy / "app.py", right, wrong)
    code, output = run_suite(copy, servers, python, FIRST)

    assert code == 1, output


@pytest.fixture
def gunicorn(python: Path, settings: Settings, tmp_path: Path) -> Iterator[tuple[Process, str]]:
    """Two workers, forked from a process that has made the application; and their address."""
    copy_of(EXAMPLE, tmp_path)
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": settings.database.url.get_secret_value(),
        "RELAY_BROKER_URL": settings.broker.url.get_secret_value(),
    }
    flask: list[str | Path] = ["env", "--chdir", tmp_path, python, "-m", "flask", "--app", APPLICATION, "create-tables"]
    run(flask, environment=environment)
    port = free_port()
    options = ["--preload", "--workers", "2", "--threads", "3", "--bind", f"127.0.0.1:{port}", APPLICATION]
    serving = Process(
        [python, "-m", "gunicorn", *options], log=tmp_path / "gunicorn.log", environment=environment, folder=tmp_path
    )
    try:
        serving.wait_until(lambda: is_listening(port), 60)
        yield serving, f"http://127.0.0.1:{port}"
    finally:
        serving.stop(signal.SIGTERM)


async def test_each_order_has_its_event_and_no_event_is_lost_though_workers_are_killed(
    gunicorn: tuple[Process, str], outbox: Outbox, channel: AbstractChannel, run_node: RunNode
) -> None:
    serving, address = gunicorn
    await outbox.connection.execute(LINGER)
    reader = Reader(channel, await declare_bound(channel, "shop.events"))
    orders = [str(uuid4()) for _ in range(REQUESTS)]
    answers: list[int] = []

    def use(number: int) -> str:
        """Place an order, then look at a product; return the visit's id, of which the shop has said that it is kept."""
        order = json.dumps({"customer": number % 7, "amount": "9.90"}).encode()
        content = {"Content-Type": "application/json"}
        status, _ = answer(Request(f"{address}/orders/{orders[number]}", order, content, method="PUT"))
        assert status in {201, 409}  # 409: its worker was killed between commit and answer
        status, body = answer(Request(f"{address}/products/{number}"))
        assert status == 200
        answers.append(number)
        return str(json.loads(body)["visit"])

    with ThreadPoolExecutor(CLIENTS) as clients:
        visits = [clients.submit(use, number) for number in range(REQUESTS)]
        for count in KILLED_AT:
            await eventually(partial(has, answers, count), f"{count} visits are answered")
            os.kill(workers_of(serving)[0], signal.SIGKILL)
        seen = {visit.result() for visit in visits}
    written = await (await outbox.connection.execute('SELECT id::text FROM "order"')).fetchall()
    assert Counter(order for (order,) in written) == Counter(orders)
    async with run_node():
        await eventually(outbox.is_empty, "the relay has sent everything")
    messages = [(message.type, json.loads(message.body)) for message in await reader.everything()]

    assert Counter(body["order"] for type_, body in messages if type_ == "OrderPlaced") == Counter(orders)
    assert seen - {body["visit"] for type_, body in messages if type_ == "ProductSeen"} == set()


def answer(request: Request) -> tuple[int, bytes]:
    """Return status and body; ask again while no answer comes, as from a worker that is killed."""
    until = time.monotonic() + 60
    while True:
        try:
            with urlopen(request, timeout=20) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            with error:
                return error.code, error.read()
        except (OSError, HTTPException):
            assert time.monotonic() < until, "no answer"
            time.sleep(0.05)


def has(answers: list[int], count: int) -> bool:
    return len(answers) >= count


def workers_of(serving: Process) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()]
