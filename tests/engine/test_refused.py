"""What the broker refuses is tried again, then parked with its words; what is delayed waits."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from relay.settings import Wire
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually


@pytest.mark.parametrize("wire", Wire)
async def test_what_is_too_large_is_parked_unsent(outbox: Outbox, queue: Reader, run_node: RunNode, wire: Wire) -> None:
    large = await outbox.insert("1", payload=json.dumps("x" * 5000))
    fine = await outbox.insert("2")

    async with run_node(wire=wire, max_attempts=1, max_message_bytes=4096):
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == [large]
    assert "max_message_bytes" in await outbox.column("last_error", large)
    assert await queue.ids(1) == [fine]


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize(
    "headers",
    [
        pytest.param('{"n": 1e400}', id="a number beyond all others"),
        pytest.param('{"n": 18446744073709551615}', id="more than 64 bits"),
        pytest.param(f'{{"deep": {"[" * 900}{"]" * 900}}}', id="deep"),
        pytest.param(f'{{"deep": {"[" * 2000}{"]" * 2000}}}', id="deeper"),
        pytest.param(f'{{"in": {{"{"x" * 129}": 1}}}}', id="a long name"),
    ],
)
async def test_headers_that_only_postgresql_takes_are_parked_and_stop_nobody(
    outbox: Outbox, queue: Reader, run_node: RunNode, wire: Wire, headers: str
) -> None:
    odd, fine = await outbox.insert("1", headers=headers), await outbox.insert("2")

    async with run_node(wire=wire, max_attempts=1):
        await eventually(outbox.is_empty, "nothing pending")

    assert await queue.ids(1) == [fine]
    assert await outbox.ids("parked") == [odd]
    assert await outbox.column("last_error", odd)


@pytest.mark.parametrize("wire", Wire)
async def test_a_row_from_another_age_is_sent(outbox: Outbox, queue: Reader, run_node: RunNode, wire: Wire) -> None:
    ids = [await outbox.insert(created_at=moment) for moment in ("0099-01-01", "infinity", "-infinity", "294000-01-01")]

    async with run_node(wire=wire):
        assert await queue.ids(4) == ids


async def test_a_delayed_row_waits_and_holds_nobody(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    due_at = datetime.now(UTC) + timedelta(seconds=10)
    delayed = await outbox.insert("1", available_at=due_at)
    later = await outbox.insert("1")

    async with run_node():
        assert await queue.ids(1) == [later]
        assert await queue.ids(1) == [delayed]
        await eventually(outbox.is_empty, "marked")

    assert await outbox.column("sent_at", delayed) >= due_at


@pytest.mark.every_postgres
@pytest.mark.parametrize(
    ("available_at", "attempts", "is_due"),
    [("-infinity", 0, True), (datetime.now(UTC) + timedelta(days=30), 1, False), ("infinity", 1, False)],
    ids=["ever since", "in 30 days", "never"],
)
async def test_however_far_away_the_moment_of_a_row_is_others_go_on(
    outbox: Outbox, queue: Reader, run_node: RunNode, available_at: datetime | str, attempts: int, is_due: bool
) -> None:
    odd = await outbox.insert("1", available_at=available_at, attempts=attempts)
    fine = await outbox.insert("2")
    expected = [odd, fine] if is_due else [fine]

    async with run_node() as node:
        assert sorted(await queue.ids(len(expected))) == expected
        await eventually(node.is_ready, "it lives")


async def test_a_retry_takes_its_backoff_along_over_a_restart(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    first = await outbox.insert("1", payload=json.dumps("x" * 5000))
    second = await outbox.insert("1")
    async with run_node(backoff_initial=1.0, backoff_max=2.0, max_message_bytes=4096):
        await eventually(lambda: attempts(outbox, first), "one attempt burnt")

    async with run_node():
        await eventually(outbox.is_empty, "both sent")

    assert await queue.ids(2) == [first, second]
    assert await outbox.column("attempts", first) >= 1


async def attempts(outbox: Outbox, id_: int) -> bool:
    return bool(await outbox.column("attempts", id_))
