"""A relay that has become ready warns of what an operator should know, and waits for no answer."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.operate.doctor import run
from relay.operate.doctor.finding import Verdict
from tests.doctor.findings import look, operator
from tests.support.eventually import eventually


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EventDict]]:
    monkeypatch.setattr(run, "READY_POLL", 0.02)
    with capture_logs() as events:
        yield events


def is_looking() -> bool:
    return any(thread.name == "doctor" for thread in threading.enumerate())


async def warned(settings: Settings, logged: list[EventDict]) -> dict[str, str]:
    """Run a node until it has been looked at; give what was said, by check."""
    node = Node(settings)
    async with run.warning(settings, node), asyncio.TaskGroup() as tasks:
        tasks.create_task(node.run())
        await eventually(lambda: not is_looking(), "the database was looked at", 60)
        node.start_draining()
    names = [event["event"] for event in logged]
    assert "doctor.warning" not in names[: names.index("relay.ready")]
    return {event["check"]: event["words"] for event in logged if event["event"] == "doctor.warning"}


async def test_it_tells_the_warnings_of_the_checklist_once_it_is_ready(
    settings: Settings, logged: list[EventDict]
) -> None:
    with operator(settings) as connection:
        connection.execute("ALTER TABLE outbox.message_pending SET (autovacuum_enabled = off)")

    told = await warned(settings, logged)

    assert told["database.vacuum"].startswith("autovacuum is off for this table;")
    assert told.keys() <= {*run.AT_START, "database.host", "database.primary"}


async def test_it_is_silent_about_what_is_fine(settings: Settings, logged: list[EventDict]) -> None:
    told = await warned(settings, logged)

    assert "database.vacuum" not in told
    for check in run.AT_START:
        found = await asyncio.to_thread(look, settings, check)
        bad = [each for each in found if each.verdict in {Verdict.WARNING, Verdict.FAILED}]
        assert (check in told) is bool(bad)


async def test_a_relay_that_ends_before_it_is_ready_looks_at_nothing(
    settings: Settings, logged: list[EventDict]
) -> None:
    async with run.warning(settings, Node(settings)):
        assert is_looking()
    await eventually(lambda: not is_looking(), "the thread has ended")

    assert logged == []
