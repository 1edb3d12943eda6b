"""An alarm of the broker: events are accepted by the buffer meanwhile, and nothing is lost or reordered."""

import pytest

from tests.engine.conftest import Reader
from tests.faults.alarms import Alarm
from tests.faults.conftest import alarm
from tests.publisher.conftest import Open
from tests.publisher.events import first_of_each, is_direct, publish_all
from tests.support.eventually import eventually

__all__ = ["alarm"]

pytestmark = pytest.mark.drills


async def test_while_an_alarm_blocks_publishers_events_go_to_the_buffer(
    publisher: Open, queue: Reader, alarm: Alarm
) -> None:
    """An alarm of the broker blocks publishers; events go to the buffer, and all arrive in order afterwards."""
    async with publisher(confirm_timeout=1.0) as sensors:
        ids = await publish_all(sensors, [1])
        await alarm.raise_()
        ids += await publish_all(sensors, range(2, 20))
        await eventually(lambda: f"broker: {alarm.reason}" in sensors.state.reasons, "it says why")
        assert sensors.state.buffered == 18

        await alarm.clear()
        await eventually(lambda: is_direct(sensors), "the buffer is drained")
        ids += await publish_all(sensors, [20])

    assert first_of_each(await queue.everything()) == {"a": ids}
