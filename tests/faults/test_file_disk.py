"""The disk under a durable publisher's buffer is full: no event is accepted, and accepted ones are sent once."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from relay.config.settings import BrokerSettings
from relay.errors import NotAcceptedError
from relay.outbox import Event
from relay.publisher import DurablePublisher
from relay.testing.servers.process import Process
from tests.engine.conftest import Reader
from tests.publisher.events import first_of_each, is_direct, measured, publish_all
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.volume import fill


async def publish_until_refused(sensors: DurablePublisher, size: int, keys: Sequence[str] = "012") -> list[str]:
    """Publish events of this size until one is not accepted; return the ids of the others."""
    ids: list[str] = []
    while True:
        event = Event("sensor", keys[len(ids) % len(keys)], "Measured", {"padding": "x" * size})
        try:
            await sensors.publish(event)
        except NotAcceptedError:
            return ids
        ids.append(str(event.message_id))


@pytest.mark.parametrize("volume", ["12m"], indirect=True)
async def test_a_full_disk_accepts_nothing_and_keeps_what_was_accepted(
    volume: Path, broker: BrokerSettings, queue: Reader
) -> None:
    """The disk under the buffer is full; the publisher accepts nothing more, and sends once what it had accepted."""
    file, late = volume / "buffer.sqlite", measured(10)
    async with proxied(broker) as (proxy, far):
        proxy.refusing = True
        async with DurablePublisher(file, broker=far, name="sensors") as sensors:
            ids = await publish_all(sensors, range(10))
            ballast = fill(volume)
            with pytest.raises(NotAcceptedError, match=f"{file} could not be written: its volume has 0 bytes free"):
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


@pytest.mark.parametrize("volume", ["16m"], indirect=True)
async def test_a_disk_that_the_buffer_has_filled_is_enough_to_send_it(
    volume: Path, broker: BrokerSettings, queue: Reader
) -> None:
    """The buffer itself has filled the disk; everything in it can still be sent."""
    file = volume / "buffer.sqlite"
    async with proxied(broker) as (proxy, far):
        proxy.refusing = True
        async with DurablePublisher(file, broker=far, name="sensors") as sensors:
            # Until not even the smallest has room.
            ids = [id_ for size in (400_000, 4_000, 1) for id_ in await publish_until_refused(sensors, size)]

            proxy.refusing = False
            await eventually(lambda: is_direct(sensors), "the file is empty", 60)

    assert sorted(str(message.message_id) for message in await queue.everything()) == sorted(ids)


@pytest.mark.parametrize("volume", ["40m"], indirect=True)
async def test_a_disk_that_the_buffer_has_filled_is_enough_to_hold_a_key(
    volume: Path, broker: BrokerSettings, queue: Reader
) -> None:
    """The buffer has filled the disk, and a message is refused; its key still waits, and arrives in order."""
    file = volume / "buffer.sqlite"
    async with proxied(broker) as (proxy, far):
        proxy.refusing = True
        async with DurablePublisher(file, broker=far, name="sensors") as sensors:
            await sensors.publish(measured(0, exchange="", routing_key="late"))
            ids = [id_ for size in (40_000, 400) for id_ in await publish_until_refused(sensors, size, keys=["a"])]

            proxy.refusing = False
            await eventually(lambda: any("NO_ROUTE" in reason for reason in sensors.state.reasons), "it is refused", 60)
            await queue.channel.declare_queue("late", durable=True)
            await eventually(lambda: is_direct(sensors), "the file is empty", 60)

    assert first_of_each(await queue.everything())["a"] == ids


@pytest.mark.parametrize("volume", ["12m"], indirect=True)
async def test_a_process_killed_on_a_full_disk_leaves_what_was_accepted(
    volume: Path, broker: BrokerSettings, queue: Reader, tmp_path: Path
) -> None:
    """A process is killed when its buffer has filled the disk; the next one sends all that was accepted."""
    file, log = volume / "buffer.sqlite", tmp_path / "log"
    process = Process([sys.executable, "-m", "tests.publisher.endless", str(file), "50000"], log=log)
    await eventually(lambda: "refused" in log.read_text(), "it is full", 60)
    process.stop(signal.SIGKILL)
    accepted = [line for line in log.read_text().splitlines() if line != "refused"]

    async with DurablePublisher(file, broker=broker, name="sensors") as sensors:
        await eventually(lambda: is_direct(sensors), "the file is empty", 60)

    arrived = [str(message.message_id) for message in await queue.everything()]
    assert arrived[: len(accepted)] == accepted
