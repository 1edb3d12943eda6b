"""examples/shop: its tests pass by the kit alone, turn red for each common mistake, and SIGTERM ends it in order."""

import asyncio
import json
import os
import signal
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
from tests.examples.suites import EXAMPLES, copy_of, mistake, run_suite
from tests.http.site import Site
from tests.support.eventually import eventually

EXAMPLE = EXAMPLES / "shop"

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


@pytest.fixture
def servers(postgres: PostgresServer) -> dict[str, str]:
    return {"OUTBOX_TEST_SERVER_URL": postgres.admin_url}


def test_its_tests_pass(servers: dict[str, str], tmp_path: Path) -> None:
    code, output = run_suite(copy_of("shop", tmp_path), servers)

    assert code == 0, output
    assert "6 passed" in output


@pytest.mark.parametrize(("name", "right", "wrong"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_its_tests_see(name: str, right: str, wrong: str, servers: dict[str, str], tmp_path: Path) -> None:
    copy = copy_of("shop", tmp_path)
    mistake(copy / "app.py", right, wrong)
    code, output = run_suite(copy, servers)

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
    server = Process(command, log=tmp_path / "log", environment=environment, folder=EXAMPLES.parent)
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
