"""A publisher whose machine's clock is wrong shifts its timestamps, and nothing else."""

from datetime import UTC, datetime, timedelta

import orjson
import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.publisher import DurablePublisher, entry
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.publisher.events import NOWHERE, publish_all
from tests.support.eventually import eventually

A_MOMENT = timedelta(seconds=60)  # more than such a test takes, and less than the clock is off


@pytest.mark.parametrize("off", [timedelta(seconds=-90), timedelta(seconds=90)], ids=["behind", "ahead"])
async def test_a_clock_that_is_off_shifts_the_timestamps_and_keeps_the_order(
    off: timedelta,
    database: DatabaseSettings,
    broker: BrokerSettings,
    outbox: Outbox,
    queue: Reader,
    run_node: RunNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true = entry.now
    async with DurablePublisher(database, broker=NOWHERE, name="sensors") as publisher:
        await publish_all(publisher, [1])
        monkeypatch.setattr(entry, "now", lambda: true() + off // timedelta(microseconds=1))
        await publish_all(publisher, [2, 3])

    async with run_node() as node:
        await eventually(outbox.is_empty, "all is sent")
        latency = node.snapshot().delivery_times.total
    async with DurablePublisher(database, broker=broker, name="sensors") as publisher:
        await publish_all(publisher, [4])

    messages = await queue.drain(4)
    assert [orjson.loads(message.body)["number"] for message in messages] == [1, 2, 3, 4]
    shifted = [message.timestamp for message in messages[1:] if message.timestamp is not None]
    assert len(shifted) == 3
    assert all(abs(at - off - datetime.now(UTC)) < A_MOMENT for at in shifted)
    assert latency >= 0
