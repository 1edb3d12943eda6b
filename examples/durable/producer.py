"""Sensors that measure all the time, in no transaction of anybody's, and lose nothing while the broker is unreachable.

    python -m examples.durable.producer accepted.txt                        # buffer: the outbox table
    python -m examples.durable.producer accepted.txt --file buffer.sqlite   # buffer: a file

Servers are found as those of `relay run` (RELAY_DATABASE_URL, RELAY_BROKER_URL, RELAY_CONFIG). What was accepted is
noted in the ledger: message id, sensor, number.
"""

import asyncio
import signal
import time
from pathlib import Path
from typing import TextIO

import structlog
from cyclopts import App

from relay.config.loading import load
from relay.config.settings import Settings
from relay.errors import NotAcceptedError
from relay.observe.log import set_up
from relay.outbox import Event
from relay.publisher import DurablePublisher

log = structlog.get_logger("examples.durable")

RETRY_AFTER = 1.0  # seconds

app = App(name="python -m examples.durable.producer")


@app.default
def main(ledger: Path, *, file: Path | None = None, sensors: int = 5, interval: float = 0.01) -> None:
    """Measure until SIGTERM or Ctrl-C, then leave nothing behind that is not accepted.

    Parameters
    ----------
    ledger
        File to which the accepted measurements are appended.
    file
        Buffer for where there is no PostgreSQL.
    sensors
        How many measure; 0 only sends what an earlier run has left in the buffer.
    interval
        Seconds between two measurements of a sensor.
    """
    settings = load().settings
    set_up(settings.log)
    with ledger.open("a", buffering=1) as lines:
        asyncio.run(produce(settings, lines, file, sensors=sensors, interval=interval))


async def produce(settings: Settings, ledger: TextIO, file: Path | None, *, sensors: int, interval: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    publisher = DurablePublisher(
        file or settings.database, broker=settings.broker, name="example", relay=settings.relay, embedded=True
    )
    async with publisher, asyncio.TaskGroup() as tasks:
        log.info("producer.ready", state=publisher.state.mode)
        for sensor in range(sensors):
            measuring = measure(publisher, f"s{sensor}", ledger, stop=stop, interval=interval)
            tasks.create_task(measuring, name=f"sensor:{sensor}")
        await stop.wait()


async def measure(
    publisher: DurablePublisher, sensor: str, ledger: TextIO, *, stop: asyncio.Event, interval: float
) -> None:
    while not stop.is_set():
        number = time.time_ns()  # rises from one run to the next
        event = Event("sensor", sensor, "Measured", {"number": number})
        await until_accepted(publisher, event)
        ledger.write(f"{event.message_id} {sensor} {number}\n")
        await asyncio.sleep(interval)


async def until_accepted(publisher: DurablePublisher, event: Event) -> None:
    while True:
        try:
            return await publisher.publish(event)
        except NotAcceptedError as error:  # neither broker nor buffer: the same event again, under the same id
            log.warning("measurement.not_accepted", reason=str(error))
            await asyncio.sleep(RETRY_AFTER)


if __name__ == "__main__":
    app()
