"""A program that opens a durable publisher, forks, and goes on in the parent.

python -m tests.publisher.forking BUFFER BROKER_URL CHILD
CHILD: `own` and `parents` use the publisher, in an event loop of that owner; `forgets` lets it go.
"""

import asyncio
import gc
import logging
import os
import signal
import sys

import pytest

from relay.errors import ForkedError
from relay.publisher import DurablePublisher
from tests.publisher.events import measured

EVENTS = 300


async def use(publisher: DurablePublisher) -> None:
    """Use it in every way, as a fork."""
    with pytest.raises(ForkedError, match="after the fork"):
        await publisher.publish(measured(0))
    with pytest.raises(ForkedError, match="after the fork"):
        await publisher.close()
    assert "fork" in publisher.state.reasons[0]
    await publisher.__aexit__(None, None, None)


def main(buffer: str, broker: str, child: str) -> None:
    publisher = DurablePublisher(buffer, broker=broker, name="forking")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(publisher.__aenter__())
    loop.run_until_complete(publisher.publish(measured(0)))
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        if child == "own":
            asyncio.run(use(publisher))
        elif child == "parents":
            loop.run_until_complete(use(publisher))
        del publisher, loop
        gc.collect()
        sys.exit(0)  # with all that Python does at its end
    assert os.waitpid(pid, 0)[1] == 0
    for number in range(1, EVENTS):
        loop.run_until_complete(publisher.publish(measured(number)))
    os._exit(0)  # as if killed


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(*sys.argv[1:])
