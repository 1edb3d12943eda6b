"""A relay that has seen more messages than the database knows of says that it went back in time."""

import asyncio

import pytest
from structlog.testing import capture_logs

from relay.config.settings import Settings
from relay.operate.doctor.database import examine_database
from relay.operate.doctor.finding import Verdict
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually

SET_BACK = "SELECT setval('outbox.message_id_seq', 3)"
REASONS = "SELECT reasons FROM outbox.node"
END = "SELECT pg_terminate_backend(backend_pid) FROM outbox.node"
SAVED = "SELECT min(watermark) FROM outbox.lane_floor HAVING count(*) = 16"
WENT_BACK = "the database went back from message 10 to 3"


async def test_a_database_that_went_back_is_told(
    outbox: Outbox, queue: Reader, run_node: RunNode, settings: Settings
) -> None:
    await outbox.insert_many(10)
    with capture_logs() as events:
        async with run_node() as node:
            await queue.ids(10)
            await eventually(outbox.is_empty, "every row marked")
            await outbox.connection.execute(SET_BACK)
            await outbox.connection.execute(END)  # as a restart does; what was seen is kept across sessions

            async def is_told() -> bool:
                told = await (await outbox.connection.execute(REASONS)).fetchone()
                return told is not None and f"history: {WENT_BACK}: see docs/backup.md" in told[0]

            await eventually(is_told, "it is told")
            found = await asyncio.to_thread(lambda: list(examine_database(settings, only=["database.history"])))
            await eventually(lambda: node.hindrances() == {}, "it delivers all the same")

    assert (found[-1].verdict, found[-1].words) == (Verdict.FAILED, WENT_BACK)
    assert [(each["seen"], each["found"]) for each in events if each["event"] == "database.went_back"] == [(10, 3)]


async def test_a_relay_that_starts_finds_what_a_former_one_has_seen(
    outbox: Outbox, queue: Reader, run_node: RunNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.engine.read.floors.SAVE_INTERVAL", 0.01)
    await outbox.insert_many(10)
    async with run_node():
        await queue.ids(10)

        async def is_saved() -> bool:
            found = await (await outbox.connection.execute(SAVED)).fetchone()
            return found == (10,)

        await eventually(is_saved, "how far it has read is saved")
    await outbox.connection.execute(SET_BACK)
    await outbox.insert()

    with capture_logs() as events:
        async with run_node():
            await queue.ids(1)

    assert [(each["seen"], each["found"]) for each in events if each["event"] == "database.went_back"] == [(10, 4)]


async def test_ids_that_no_row_has_may_be_given_again(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    await outbox.insert_many(3)
    with capture_logs() as events:
        async with run_node():
            await queue.ids(3)
            for given in (10, 5):  # as after a crash, which gives the ids again that no commit had
                await outbox.connection.execute(f"SELECT setval('outbox.message_id_seq', {given})")
                await eventually(outbox.is_empty, "every row marked")
            assert await outbox.insert() == 6
            await queue.ids(1)
            await eventually(outbox.is_empty, "every row marked")

    assert "database.went_back" not in {each["event"] for each in events}
