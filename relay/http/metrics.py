"""The metrics: what the relay knows of itself, and what waits in the table. docs/metrics.md lists them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import relay
from relay.engine.node import Node
from relay.http.backlog import Backlog, Counts


@dataclass(frozen=True, slots=True)
class Figures:
    """The relay at one moment."""

    ready: bool
    in_flight: int
    published: int
    failures: dict[str, int]  # by reason
    counts: Counts | None  # None: the database does not tell


async def take_figures(node: Node, backlog: Backlog) -> Figures:
    """Take them on the event loop, where nothing else changes them meanwhile."""
    counts = await backlog.counts()
    failures = {str(outcome): number for outcome, number in node.failures.items()}
    return Figures(not node.hindrances(), node.in_flight, node.published_total, failures, counts)


class RelayCollector(Collector):
    """Shows figures that are taken anew at each scrape: the engine does nothing for it."""

    def __init__(self, take: Callable[[], Figures]) -> None:
        self._take = take

    def collect(self) -> Iterator[Metric]:
        figures = self._take()
        build = InfoMetricFamily("outbox_build", "Release of this relay")
        build.add_metric([], {"version": relay.__version__})
        yield build
        yield GaugeMetricFamily("outbox_ready", "1 while this relay can deliver, as /readyz tells", int(figures.ready))
        yield GaugeMetricFamily(
            "outbox_in_flight_messages", "Messages sent by this relay and not yet settled", figures.in_flight
        )
        yield CounterMetricFamily(
            "outbox_published", "Messages that this relay sent, and that are confirmed and marked", figures.published
        )
        failures = CounterMetricFamily(
            "outbox_publish_failures", "Attempts of this relay that ended without a confirm", labels=["reason"]
        )
        for reason, number in figures.failures.items():
            failures.add_metric([reason], number)
        yield failures
        if figures.counts is not None:  # absent is better than a number that nobody has counted
            yield from _backlog(figures.counts)


def registry(take: Callable[[], Figures]) -> CollectorRegistry:
    """Give what is served: our figures, and those of the process."""
    served = CollectorRegistry()
    served.register(RelayCollector(take))
    ProcessCollector(registry=served)
    return served


def _backlog(counts: Counts) -> Iterator[Metric]:
    yield GaugeMetricFamily("outbox_pending_messages", "Rows that wait in the table", counts.pending)
    yield GaugeMetricFamily(
        "outbox_oldest_pending_age_seconds",
        "How long the oldest row that is due has waited; 0 when none waits",
        counts.oldest_pending_age,
    )
    yield GaugeMetricFamily("outbox_parked_messages", "Rows that wait for an operator", counts.parked)
