"""A program that opens a durable publisher, forks, and goes on in the parent.

python -m tests.publisher.forking BUFFER BROKER_URL CHILD
CHILD: `own` and `parents` use the publisher, in an event loop of that owner; `forgets` lets it go.
`closes` closes its copy of the parent's loop.
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
from tests.support.fork import watched_by

EVENTS = 300


async def use(publisher: DurablePublisher) -> None:
    """Use it in every way, as a fork."""
    with pytest.raises(ForkedError, match="after the fork"):
        _ = publisher.publish(measured(0))  # not awaited: the loop's thread may be missing
    with pytest.raises(ForkedError, match="after the fork"):
        _ = publisher.close()
    with pytest.raises(ForkedError, match="after the fork"):
        publisher.reload()
    assert "fork" in publisher.state.reasons[0]
    await publisher.__aexit__(None, None, None)


def main(buffer: str, broker: str, child: str) -> None:
    publisher = DurablePublisher(buffer, broker=broker, name="forking")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(publisher.__aenter__())
    loop.run_until_complete(publisher.publish(measured(0)))
    watched = watched_by(loop)
    assert watched
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        assert not watched_by(loop)
        if child == "own":
            asyncio.run(use(publisher))
        elif child == "parents":
            loop.run_until_complete(use(publisher))
        elif child == "closes":
            loop.close()
        del publisher, loop
        gc.collect()
        sys.exit(0)  # with all that Python does at its end
    assert os.waitpid(pid, 0)[1] == 0
    assert watched_by(loop) == watched
    for number in range(1, EVENTS):
        loop.run_until_complete(publisher.publish(measured(number)))
    os._exit(0)  # as if killed


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(*sys.argv[1:])
