"""What a probe shows of a consumer, or a member of a pool.

async with answering_for(consumer, "0.0.0.0:8080"):
    await consumer.run()
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

from relay.errors import importing

with importing("consume"):
    from prometheus_client.core import Metric

    from relay.consume import Consumer
    from relay.consume.pool import PartitionedConsumer
    from relay.probes.cached_answer import CachedAnswer
    from relay.probes.consumer_metrics import metrics
    from relay.probes.server import answering
    from relay.runtime.hindrance import Hindrance


@asynccontextmanager
async def answering_for(consumer: Consumer | PartitionedConsumer, listen: str) -> AsyncIterator[None]:
    """Answer requests about the consumer meanwhile.

    Args:
        listen: `host:port` or `[host]:port`, as `http.listen` is; empty: answer nobody.
    Raises:
        ListenError: the address cannot be had.
    """
    if not listen:
        yield
        return
    waiting = CachedAnswer(consumer.ready_count)
    try:
        async with answering(listen, _ConsumerSubject(consumer, waiting)):
            yield
    finally:
        await waiting.close()


class _ConsumerSubject:
    """A consumer, ready while it consumes, has its database, and works on what it has in hand."""

    def __init__(self, consumer: Consumer | PartitionedConsumer, waiting: CachedAnswer[int]) -> None:
        self._consumer = consumer
        self._waiting = waiting

    def hindrances(self, query: str) -> dict[str, Hindrance]:  # noqa: ARG002  (there is nothing to ask for)
        return self._consumer.hindrances()

    async def look(self) -> Callable[[], Iterator[Metric]]:
        waiting = await self._waiting.answer()
        return partial(metrics, self._consumer.snapshot(), waiting)
