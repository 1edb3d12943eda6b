"""Processes of `multiprocessing` publish, each by a publisher that it opens itself, while their parent's goes on."""

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relay.config.settings import BrokerSettings
from relay.errors import ForkedError
from relay.publisher import DurablePublisher
from tests.engine.conftest import Reader
from tests.publisher.events import NOWHERE, measured

CHILDREN = 2

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


of_parent = SimpleNamespace(publisher=None)


def use_that_of_parent() -> None:
    _ = of_parent.publisher.publish(measured(0))


def publish_one(folder: Path, broker: str, number: int) -> None:
    async def publish() -> None:
        async with DurablePublisher(folder / f"{number}.sqlite", broker=broker, name=f"child-{number}") as publisher:
            await publisher.publish(measured(number))

    asyncio.run(publish())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
async def test_each_process_publishes_by_a_publisher_of_its_own(
    method: str, tmp_path: Path, broker: BrokerSettings, broker_url: str, queue: Reader
) -> None:
    context: Any = multiprocessing.get_context(method)
    async with DurablePublisher(tmp_path / "0.sqlite", broker=broker, name="parent") as publisher:
        await publisher.publish(measured(0))

        children = [
            context.Process(target=publish_one, args=(tmp_path, broker_url, number)) for number in (1, CHILDREN)
        ]
        for child in children:
            child.start()
        for child in children:
            await asyncio.to_thread(child.join)

        await publisher.publish(measured(CHILDREN + 1))
        messages = await queue.drain(CHILDREN + 2)

    assert [child.exitcode for child in children] == [0] * CHILDREN
    assert sorted(message.body for message in messages) == [b'{"number":%d}' % number for number in range(CHILDREN + 2)]


async def test_a_pool_of_forks_hands_on_that_they_cannot_use_the_publisher_of_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with DurablePublisher(tmp_path / "buffer.sqlite", broker=NOWHERE, name="parent") as publisher:
        monkeypatch.setattr(of_parent, "publisher", publisher)
        with (
            ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool,
            pytest.raises(ForkedError, match="after the fork") as raised,
        ):
            await asyncio.wrap_future(pool.submit(use_that_of_parent))

    assert raised.value.opened_by == os.getpid()
