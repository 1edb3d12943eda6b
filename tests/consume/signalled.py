"""A program with consumers and other work, to be told to stop: python -m tests.consume.signalled MODE."""

import asyncio
import os
import signal
import sys

import structlog

from relay.consume import Consumer, Inbox
from tests.consume.effects import QUEUE, count


def consumer(name: str) -> Consumer:
    inbox = Inbox(os.environ["TEST_DATABASE_URL"], name)
    return Consumer(QUEUE, [count], inbox=inbox, broker=os.environ["TEST_BROKER_URL"])


async def alone() -> None:
    await consumer("one").run()


async def two() -> None:
    await asyncio.gather(consumer("one").run(), consumer("two").run())


async def beside_a_server() -> None:
    """The server has its own handler on the loop, and ends the consumer in its clean-up."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    beside = consumer("one")
    consuming = asyncio.create_task(beside.run())
    await stopped.wait()
    print("the server was told", flush=True)
    beside.stop()
    await consuming


async def beside_a_server_on_demand() -> None:
    """Both take the signal."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(stopped.set))
    consuming = asyncio.create_task(consumer("one").run(signals=True))
    await stopped.wait()
    print("the server was told", flush=True)
    await consuming


MODES = {each.__name__: each for each in (alone, two, beside_a_server, beside_a_server_on_demand)}


if __name__ == "__main__":
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    asyncio.run(MODES[sys.argv[1]]())
    print("all has ended", flush=True)
