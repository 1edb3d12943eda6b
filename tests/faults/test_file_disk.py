"""The disk under a durable publisher's file is full: nothing more is accepted, and what was is sent once."""

from pathlib import Path

import pytest
from yarl import URL

from relay.errors import NotAcceptedError
from relay.publisher import DurablePublisher
from relay.settings import BrokerSettings
from tests.consume.effects import through
from tests.engine.conftest import Reader
from tests.publisher.events import first_of_each, is_direct, measured, publish_all
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy
from tests.support.volume import fill


@pytest.mark.parametrize("volume", ["1m"], indirect=True)
async def test_a_full_disk_accepts_nothing_and_keeps_what_was_accepted(
    volume: Path, broker: BrokerSettings, queue: Reader
) -> None:
    file, late = volume / "buffer.sqlite", measured(10)
    async with FaultProxy("127.0.0.1", URL(broker.url.get_secret_value()).port or 5672) as proxy:
        proxy.refusing = True
        async with DurablePublisher(file, broker=through(broker, proxy.port), name="sensors") as sensors:
            ids = await publish_all(sensors, range(10))
            ballast = fill(volume)
            with pytest.raises(NotAcceptedError, match=f"{file} could not be written: database or disk is full"):
                await sensors.publish(late)

            # What is in the file goes out; that it is out cannot be noted.
            proxy.refusing = False
            arrived = await queue.drain(10)
            await eventually(lambda: f"{file}: database or disk is full" in sensors.state.reasons, "it says why")
            assert not is_direct(sensors)

            ballast.unlink()
            await eventually(lambda: is_direct(sensors), "the file is empty")
            await sensors.publish(late)

    messages = [*arrived, *await queue.drain(1)]
    assert first_of_each(messages) == {"a": [*ids, str(late.message_id)]}
    assert len(messages) == 11
    assert await queue.everything() == []
