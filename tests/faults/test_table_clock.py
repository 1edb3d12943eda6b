"""The clock of the relay's host jumps: no decision of the relay depends on it."""

import ast
import itertools
import time
from pathlib import Path

import pytest

from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually

RELAY = Path(__file__).resolve().parents[2] / "relay"
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
STAMPS = {
    "console/checkup.py",
    "console/consumers.py",
    "console/forms.py",  # how old a page is that sends its form; pages are made and read by one host
    "console/looks.py",
    "console/pages/replay.py",
    "console/sampler.py",
    "console/templates.py",  # the console's clock, next to which the browser shows ages
    "console/webhook.py",
    "consume/classify.py",
    "django/pages.py",  # since when a list is wanted
    "operate/doctor/broker_hosts.py",  # until when a certificate is good
    "operate/doctor/server.py",  # compares both clocks
    "operate/letters/asked.py",
    "operate/routes/map.py",
    "operate/sent/work.py",
    "publisher/entry.py",
    "testing/databases.py",  # the day in the name of a database
    "testing/harness.py",  # which delayed rows are due
    "testing/memory.py",
}  # write down when something was; nothing waits for it


def test_nothing_asks_the_wall_clock() -> None:
    """No module asks the wall clock, except to write down a time."""
    asking = {
        file.relative_to(RELAY).as_posix()
        for file in RELAY.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WALL_CLOCK
    }

    assert asking == STAMPS


@pytest.mark.usefixtures("refused_by_broker")
async def test_a_clock_that_jumps_by_days_changes_nothing(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's clock jumps by days; every row is sent, and a refused one is parked, as ever."""
    day = 86_400.0
    jumps = itertools.cycle((0.0, 400 * day, -400 * day, 30 * day))
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + next(jumps))
    faulty = await outbox.insert_faulty("refused")  # so that backoffs are among what is waited for

    async with run_node(max_attempts=3) as node:
        for _ in range(5):
            await outbox.insert_many(200)
            await eventually(outbox.is_empty, "these are sent, the refused one is parked")
        assert not node.hindrances()

    assert sorted(await queue.ids(1000)) == await outbox.ids("sent")
    assert await outbox.ids("parked") == [faulty]
