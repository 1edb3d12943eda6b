"""The metrics: what the relay knows of itself, and what waits in the table. docs/metrics.md lists them."""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import relay
from relay.engine.figures import Figures
from relay.engine.node import Node
from relay.engine.row import Outcome
from relay.http.backlog import Backlog, Counts
from relay.observe.histogram import Histogram


class Seen(NamedTuple):
    """The relay and the table at one moment."""

    node: Figures
    counts: Counts | None  # None: the database does not tell


async def look(node: Node, backlog: Backlog) -> Seen:
    """Look on the event loop, where nothing else changes the figures meanwhile."""
    counts = await backlog.counts()
    return Seen(node.figures(), counts)


class RelayCollector(Collector):
    """Shows figures that are taken anew at each scrape: the engine does nothing for it."""

    def __init__(self, take: Callable[[], Seen]) -> None:
        self._take = take

    def collect(self) -> Iterator[Metric]:
        node, counts = self._take()
        build = InfoMetricFamily("outbox_build", "Release of this relay")
        build.add_metric([], {"version": relay.__version__})
        yield build
        yield from _state(node)
        yield from _outcomes(node)
        yield from _troubles(node)
        if counts is not None:  # absent is better than a number that nobody has counted
            yield from _backlog(counts)


def registry(take: Callable[[], Seen]) -> CollectorRegistry:
    """Give what is served: our figures, and those of the process."""
    served = CollectorRegistry()
    served.register(RelayCollector(take))
    ProcessCollector(registry=served)
    return served


def _state(node: Figures) -> Iterator[Metric]:
    yield GaugeMetricFamily("outbox_ready", "1 while this relay can deliver, as /readyz tells", int(node.ready))
    yield GaugeMetricFamily("outbox_stalled", "1 while messages wait and none settles", int(node.stalled))
    yield GaugeMetricFamily("outbox_lanes_held", "Lanes that this relay carries", node.lanes)
    yield GaugeMetricFamily(
        "outbox_in_flight_messages", "Messages sent by this relay and not yet settled", node.in_flight
    )


def _outcomes(node: Figures) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "outbox_published", "Messages that this relay sent, and that are confirmed and marked", node.published
    )
    yield _counts(
        "outbox_publish_failures", "Attempts of this relay that ended without a confirm", "reason", node.failures
    )
    for outcome in (Outcome.RETURNED, Outcome.NACKED, Outcome.UNKNOWN):
        yield CounterMetricFamily(f"outbox_{outcome}", f"Attempts that ended as {outcome}", node.failures[outcome])
    yield _histogram("outbox_publish_duration_seconds", "From the write to the confirm", node.confirm_times)
    yield _histogram(
        "outbox_end_to_end_latency_seconds", "From the writer's transaction to the mark", node.delivery_times
    )
    yield CounterMetricFamily("outbox_sweep_finds", "Rows that only a sweep has found", node.sweep_finds)


def _troubles(node: Figures) -> Iterator[Metric]:
    lost = CounterMetricFamily("outbox_reconnects", "Connections that were lost", labels=["end", "reason"])
    for end, losses in (("broker", node.broker_losses), ("database", node.database_losses)):
        for reason, number in {"lost": 0, **losses}.items():  # from 0 on, or the first loss would be no increase
            lost.add_metric([end, reason], number)
    yield lost
    yield CounterMetricFamily(
        "outbox_broker_blocked_seconds", "For how long the broker has blocked this relay", node.blocked_seconds
    )


def _backlog(counts: Counts) -> Iterator[Metric]:
    yield GaugeMetricFamily("outbox_pending_messages", "Rows that wait in the table", counts.pending)
    yield GaugeMetricFamily(
        "outbox_oldest_pending_age_seconds",
        "How long the oldest row that is due has waited; 0 when none waits",
        counts.oldest_pending_age,
    )
    yield GaugeMetricFamily("outbox_parked_messages", "Rows that wait for an operator", counts.parked)
    yield GaugeMetricFamily("outbox_quarantined_routes", "Routes that do not work", counts.quarantined_routes)
    yield GaugeMetricFamily("outbox_quarantined_messages", "Rows that wait for such a route", counts.quarantined)


def _counts(name: str, about: str, label: str, numbers: Mapping[Outcome, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, number in numbers.items():
        family.add_metric([value], number)
    return family


def _histogram(name: str, about: str, histogram: Histogram) -> Metric:
    buckets = [("+Inf" if bound == inf else str(bound), number) for bound, number in histogram.buckets()]
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=histogram.total)
