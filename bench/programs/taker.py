"""A consumer that acknowledges what comes and notes which rows it were: `python -m bench.programs.taker FILE`."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiormq
from aiormq.abc import DeliveredMessage

from bench.frame.notes import open_notes
from bench.frame.queue import QUEUE
from relay.testing.servers.process import Process

PREFETCH = 2000
ACK_INTERVAL = 0.05  # seconds; an ack for each message would cost more than all the rest
URL = "TAKER_BROKER_URL"
READY = "taking"


@contextmanager
def running_taker(broker_url: str, *, log: Path, taken: Path) -> Iterator[Process]:
    """Start one, which notes in `taken`, and end it with the block."""
    log.write_text("")
    command = [sys.executable, "-m", "bench.programs.taker", str(taken)]
    taker = Process(command, log=log, environment={**os.environ, URL: broker_url}, name="taker")
    try:
        taker.wait_until(lambda: READY in log.read_text(), 30)
        yield taker
    finally:
        taker.stop(signal.SIGTERM)


async def _take(broker_url: str, file: Path) -> None:
    note, ids, last_tag = open_notes(file), list[int](), 0

    async def take(message: DeliveredMessage) -> None:
        nonlocal last_tag
        headers = message.header.properties.headers or {}
        ids.append(int(str(headers["x-outbox-id"])))
        last_tag = message.delivery_tag or last_tag

    connection = await aiormq.connect(broker_url)
    channel = await connection.channel()
    await channel.basic_qos(prefetch_count=PREFETCH)
    await channel.basic_consume(QUEUE, take)
    print(READY, flush=True)
    while not connection.is_closed:
        if ids:
            fresh, ids = ids, []
            note(fresh)
            await channel.basic_ack(last_tag, multiple=True)
        await asyncio.sleep(ACK_INTERVAL)
    sys.exit("the connection is lost")


if __name__ == "__main__":
    asyncio.run(_take(os.environ[URL], Path(sys.argv[1])))
