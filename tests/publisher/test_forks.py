"""A fork is told that it cannot use what its parent has opened, and the parent goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.publisher import DurablePublisher
from tests.engine.conftest import Reader
from tests.publisher.events import NOWHERE, is_direct
from tests.publisher.forking import EVENTS
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]


def run_forking(place: DatabaseSettings | Path, broker: BrokerSettings, child: str) -> None:
    buffer = place if isinstance(place, Path) else place.url.get_secret_value()
    arguments = [buffer, broker.url.get_secret_value(), child]
    command = [sys.executable, "-m", "tests.publisher.forking", *arguments]

    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=100)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("child", ["own", "parents", "forgets", "closes"])
async def test_a_fork_is_refused_at_once_and_its_parent_goes_on(
    place: DatabaseSettings | Path, broker: BrokerSettings, queue: Reader, child: str
) -> None:
    run_forking(place, broker, child)

    async with DurablePublisher(place, broker=broker, name="forking", embedded=True) as again:
        # A relay without reasons may still have rows to send.
        await eventually(
            lambda: is_direct(again) and not again.state.reasons, "what the parent has left in the buffer is sent"
        )
    messages = await queue.everything()
    assert len({message.message_id for message in messages}) == EVENTS


async def test_a_fork_that_ends_takes_nothing_from_the_file_of_its_parent(
    tmp_path: Path, broker: BrokerSettings, queue: Reader
) -> None:
    buffer = tmp_path / "buffer.sqlite"
    run_forking(buffer, NOWHERE, "forgets")

    async with DurablePublisher(buffer, broker=broker, name="forking"):
        messages = await queue.drain(EVENTS)
    assert len({message.message_id for message in messages}) == EVENTS
