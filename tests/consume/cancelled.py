"""One run of a consumer, or of a member of a pool, that a test may cancel."""

import asyncio
from contextlib import suppress

from relay.consume import Consumer
from relay.consume.pool import PartitionedConsumer
from tests.support.cancels import Open, Run
from tests.support.eventually import eventually


async def run_once(run: Run, consumer: Consumer | PartitionedConsumer, *, applies: int) -> None:
    """Run it until it has applied so many, or is cancelled before; see that nothing of it is left open."""

    async def stop_when_applied() -> None:
        await eventually(lambda: consumer.counters.acknowledged >= applies, "it has applied some")
        consumer.stop()

    before = Open.now()
    with run.of(consumer.run(signals=False)) as task:
        stopping = asyncio.create_task(stop_when_applied())
        with suppress(asyncio.CancelledError):
            await task
        stopping.cancel()
    await before.is_all()
