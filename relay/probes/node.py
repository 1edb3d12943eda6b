"""What a probe shows of a relay node."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client.core import Metric

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.probes.backlog import Backlog
from relay.probes.metrics import metrics
from relay.probes.server import answering
from relay.runtime.hindrance import Hindrance


@asynccontextmanager
async def answering_for(node: Node, settings: Settings) -> AsyncIterator[None]:
    """Answer requests about the node meanwhile, if the settings name an address.

    Raises:
        ListenError: the address cannot be had.
    """
    if not settings.http.listen:
        yield
        return
    backlog = Backlog(settings.database, settings.relay)
    try:
        async with answering(settings.http.listen, _NodeSubject(node, backlog)):
            yield
    finally:
        await backlog.close()


class _NodeSubject:
    """A node, ready while it has lanes and both connections, is not draining, and delivers."""

    def __init__(self, node: Node, backlog: Backlog) -> None:
        self._node = node
        self._backlog = backlog

    def hindrances(self, query: str) -> dict[str, Hindrance]:
        hindrances = self._node.hindrances()
        if query == "standby=ok":
            hindrances.pop("lanes", None)
        return hindrances

    async def look(self) -> Callable[[], Iterator[Metric]]:
        counts = await self._backlog.counts()
        return partial(metrics, self._node.snapshot(), counts)
