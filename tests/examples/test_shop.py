"""examples/shop: its tests pass by the kit alone, turn red for each common mistake, and SIGTERM ends it in order."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from relay.config.loading import load
from relay.config.settings import Settings
from relay.servers.rabbitmq import topology
from relay.testing.servers.postgres import PostgresServer
from relay.testing.servers.process import Process, free_port, is_listening
from tests.engine.conftest import RunNode
from tests.http.site import Site
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "shop"

ADD = "    await add(session, OrderPlaced(order=order.id, customer=new.customer, amount=new.amount))\n"

# What is a mistake, the code it stands for, and the code with it.
MISTAKES = [
    ("the event is forgotten", ADD, ""),
    ("the event is committed before the change", ADD, f"{ADD}    await session.commit()\n"),
    ("another type", '@event("OrderPlaced"', '@event("OrderCreated"'),
    ("another key", 'version=2, key=("customer", "customer")', 'version=2, key=("order", "order")'),
    (
        "an effect outside of the transaction",
        "    await session.execute(total)\n",
        "    async with session.bind.engine.begin() as other:\n        await other.execute(total)\n",
    ),
    ("no way from an older version", "@upcast\n", ""),
]


def run_tests(folder: Path, postgres: PostgresServer, replaced: tuple[str, str] = ("", "")) -> tuple[int, str]:
    """Run the tests of a copy of the example in which a code is replaced."""
    copy = folder / "examples" / "shop"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = (copy / "app.py").read_text()
    assert replaced[0] in code
    (copy / "app.py").write_text(code.replace(*replaced))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, copy],
        env={**os.environ, "OUTBOX_TEST_SERVER_URL": postgres.admin_url},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def test_its_tests_pass(postgres: PostgresServer, tmp_path: Path) -> None:
    code, output = run_tests(tmp_path, postgres)

    assert code == 0, output
    assert "6 passed" in output


@pytest.mark.parametrize(("mistake", "right", "wrong"), MISTAKES, ids=[mistake for mistake, *_ in MISTAKES])
def test_its_tests_see(mistake: str, right: str, wrong: str, postgres: PostgresServer, tmp_path: Path) -> None:
    code, output = run_tests(tmp_path, postgres, (right, wrong))

    assert code == 1, output


async def test_sigterm_ends_the_server_and_drains_the_consumer(
    settings: Settings, run_node: RunNode, tmp_path: Path
) -> None:
    await topology.apply(settings.broker, load(config=EXAMPLE / "relay.toml", environ={}).settings.topology)
    port = free_port()
    site = Site(f"127.0.0.1:{port}")
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": settings.database.url.get_secret_value(),
        "RELAY_BROKER_URL": settings.broker.url.get_secret_value(),
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "examples.shop.app:make_app", "--port", str(port)]
    server = Process(command, log=tmp_path / "log", environment=environment, folder=ROOT)
    try:
        await eventually(lambda: is_listening(port) or not server.is_running(), "the server starts")
        assert server.is_running(), server.log_end()
        async with run_node():
            for amount in ("9.90", "0.10"):
                await asyncio.to_thread(place_order, site, {"customer": 17, "amount": amount})
            await eventually(lambda: has_total(site, "10.00"), "both orders are added up")
        server.tell(signal.SIGTERM)
        await eventually(lambda: not server.is_running(), "the server ends")
    finally:
        server.stop(signal.SIGKILL)

    log = (tmp_path / "log").read_text()
    assert "Application shutdown complete" in log
    assert "Traceback" not in log


def place_order(site: Site, order: dict[str, object]) -> None:
    request = urllib.request.Request(
        f"http://{site.address}/orders", json.dumps(order).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


async def has_total(site: Site, amount: str) -> bool:
    return (await site.get("/customers/17/total")).body == json.dumps(amount)
