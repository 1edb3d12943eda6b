"""A fork is told that it cannot run a consumer that its parent has run; one that was only made it can."""

import asyncio
import os

import psycopg
import pytest

from relay.consume import Message, on
from relay.errors import ForkedError
from tests.consume.effects import MakeConsumer
from tests.support.eventually import eventually

REFUSED = 7


@on("Counted")
async def ignore(message: Message, connection: psycopg.AsyncConnection) -> None:
    pass


def code_of_fork(coroutine: object) -> int:
    """Begin the coroutine in a fork, as an event loop there would, and return the exit code."""
    if (pid := os.fork()) == 0:
        try:
            coroutine.send(None)  # type: ignore[attr-defined]
        except ForkedError:
            os._exit(REFUSED)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
async def test_a_fork_cannot_run_a_consumer_that_its_parent_runs(make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(ignore)
    unused = make_consumer(ignore)
    running = asyncio.create_task(consumer.run(signals=False))
    await eventually(lambda: not consumer.hindrances(), "it is ready")
    again, first = consumer.run(signals=False), unused.run(signals=False)

    assert code_of_fork(again) == REFUSED
    assert code_of_fork(first) == 0

    again.close()
    first.close()
    consumer.stop()
    await running
