"""A fault of the publisher itself stops no event for good: it is logged, and events go to the buffer meanwhile."""

from collections.abc import Container, Iterable

import pytest
from structlog.testing import capture_logs

from relay.engine.row import Row
from relay.engine.send import broker_link, frames
from tests.engine.conftest import Reader
from tests.publisher.conftest import Open
from tests.publisher.events import first_of_each, is_direct, publish_all
from tests.support.eventually import eventually


async def test_a_fault_of_the_wire_is_logged_and_events_go_on(
    publisher: Open, queue: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [RuntimeError("first"), KeyError("second"), KeyError("third")]

    class Faulty(frames.Encoder):
        def encode(self, rows: Iterable[Row], redelivered: Container[int]) -> frames.Encoded:
            if faults:
                raise faults.pop(0)
            return super().encode(rows, redelivered)

    monkeypatch.setattr(broker_link, "Encoder", Faulty)
    with capture_logs() as logged:
        async with publisher() as sensors:
            ids = await publish_all(sensors, range(20))
            await eventually(lambda: is_direct(sensors), "the buffer is drained")
            ids += await publish_all(sensors, [20])

    assert first_of_each(await queue.drain(21)) == {"a": ids}
    assert not faults
    failed = [event["reason"] for event in logged if event["event"] in ("publisher.failed", "relay.failed")]
    assert len(failed) == 3
    assert "first" in failed[0]
