"""Publish into a file, without a broker, until killed; the ids of what was accepted go to stdout.

python -m tests.publisher.endless FILE
"""

import asyncio
import logging
import os
import sys
from itertools import count

import structlog

from relay.publisher import DurablePublisher
from tests.publisher.events import NOWHERE, measured


async def main() -> None:
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    async with DurablePublisher(sys.argv[1], broker=NOWHERE, name="sensors") as sensors:
        for number in count():
            event = measured(number)
            await sensors.publish(event)
            os.write(1, f"{event.message_id}\n".encode())


if __name__ == "__main__":
    asyncio.run(main())
