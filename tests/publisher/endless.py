"""Publish into a file, without a broker, until killed; the ids of what was accepted go to stdout.

python -m tests.publisher.endless FILE [CHARACTERS]

What is not accepted is told as "refused".
"""

import asyncio
import logging
import os
import sys
from itertools import count

import structlog

from relay.errors import NotAcceptedError
from relay.outbox import Event
from relay.publisher import DurablePublisher
from tests.publisher.events import NOWHERE


async def main() -> None:
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    async with DurablePublisher(sys.argv[1], broker=NOWHERE, name="sensors") as sensors:
        for number in count():
            event = Event("sensor", "a", "Measured", {"number": number, "padding": "x" * size})
            try:
                await sensors.publish(event)
            except NotAcceptedError:
                os.write(1, b"refused\n")
            else:
                os.write(1, f"{event.message_id}\n".encode())


if __name__ == "__main__":
    asyncio.run(main())
