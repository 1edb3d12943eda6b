"""A snapshot is held open: deliveries stay right, dead rows are not walked over, and the log names who holds it."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from relay.config.settings import Settings
from relay.engine.nodes import vacuum as horizon
from tests.engine.conftest import NO_SWEEP, Outbox, Reader, RunNode
from tests.support.events import Events, named
from tests.support.eventually import eventually
from tests.support.roles import SCRIPT

TURNS, ROWS = 20, 500

ENTRIES_READ = """
    SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'message_pending_lane_id'
"""


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay names a holder within a second instead of a minute."""
    monkeypatch.setattr(horizon, "LOOK_INTERVAL", 0.1)
    monkeypatch.setattr(horizon, "HELD_LONG", 0.5)


@contextmanager
def snapshot(url: str) -> Iterator[psycopg.Connection]:
    """Hold a snapshot until the end of the block, as a forgotten report does."""
    with psycopg.connect(url, application_name="forgotten report") as report:
        report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT count(*) FROM outbox.message")
        yield report


async def test_dead_rows_that_a_snapshot_keeps_are_not_walked_over(
    outbox: Outbox, queue: Reader, database_url: str, run_node: RunNode
) -> None:
    """A snapshot keeps dead rows; the relay does not read them again for each later row."""
    with snapshot(database_url):
        async with run_node(**NO_SWEEP):
            for _ in range(TURNS):
                await outbox.insert_many(ROWS)
                await eventually(outbox.is_empty, "this turn's rows are sent")
        sent = await outbox.ids("sent")

        assert sorted(await queue.ids(TURNS * ROWS)) == sent
        # A session's figures come at the latest when it has ended: each row is read, and found again for its mark.
        await eventually(lambda: entries_read(database_url) > 2 * TURNS * ROWS, "the figures are there")
        assert entries_read(database_url) < 40 * TURNS * ROWS


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("role", ["postgres", "outbox_relay"])
async def test_who_holds_a_snapshot_is_named_once_and_so_is_its_end(
    outbox: Outbox, settings: Settings, database_url: str, run_node: RunNode, role: str
) -> None:
    """A session holds a snapshot; the log names it once, and once its end, even if its age is not visible."""
    await outbox.connection.execute(SCRIPT.encode())
    url = SecretStr(f"{database_url}?options=-crole%3D{role}")
    base = settings.model_copy(update={"database": settings.database.model_copy(update={"url": url})})

    with capture_logs() as events:
        async with run_node(base) as node:
            with snapshot(database_url) as report:
                pid = str(report.info.backend_pid)
                await eventually(lambda: bool(told(events, "vacuum.held_back", pid)), "the snapshot is named")
                await outbox.insert()
                assert not node.hindrances()
            await eventually(lambda: bool(told(events, "vacuum.released", pid)), "its end is told")

    (event,) = told(events, "vacuum.held_back", pid)
    assert (event["kind"], event["owner"]) == ("session", "forgotten report")
    assert event["age_s"] >= 0
    assert event["log_level"] == "warning"


@pytest.mark.usefixtures("_soon")
async def test_a_server_that_shows_nobody_s_sessions_is_told_of_once(
    outbox: Outbox, settings: Settings, database_url: str, queue: Reader, run_node: RunNode
) -> None:
    """The relay may not see other sessions; it logs that once, and delivers."""
    await outbox.connection.execute(SCRIPT.encode())
    await outbox.connection.execute("REVOKE SELECT ON pg_stat_activity FROM PUBLIC")
    url = SecretStr(f"{database_url}?options=-crole%3Doutbox_relay")
    base = settings.model_copy(update={"database": settings.database.model_copy(update={"url": url})})

    with capture_logs() as events:
        async with run_node(base):
            await eventually(lambda: bool(named(events, "vacuum.not_watched")), "it says so")
            id_ = await outbox.insert()
            assert await queue.ids(1) == [id_]

    assert len(named(events, "vacuum.not_watched")) == 1


def entries_read(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(ENTRIES_READ).fetchone()
    return int(row[0]) if row else 0


def told(events: Events, name: str, holder: str) -> Events:
    return [event for event in named(events, name) if event["name"] == holder]
