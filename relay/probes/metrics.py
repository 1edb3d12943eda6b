"""The metrics: what the relay knows of itself, and what waits in the table. docs/metrics.md lists them."""

from collections.abc import Iterable, Iterator, Mapping
from math import inf

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from relay.engine.row import Outcome
from relay.engine.snapshot import NodeSnapshot
from relay.observe.histogram import Histogram
from relay.probes.backlog import Batches, Counts


def metrics(node: NodeSnapshot, counts: Counts | None) -> Iterator[Metric]:
    """Yield the metrics of a relay and of its table at one moment; no counts: the database does not answer."""
    yield from _state(node)
    yield from _outcomes(node)
    yield from _troubles(node)
    if counts is not None:  # absent is better than a number that nobody has counted
        yield from _backlog(counts)


def reconnects(name: str, broker: Mapping[str, int], database: Mapping[str, int], **labels: str) -> Metric:
    """Return the lost connections of both ends by reason."""
    lost = CounterMetricFamily(name, "Connections that were lost", labels=[*labels, "end", "reason"])
    for end, losses in (("broker", broker), ("database", database)):
        for reason, number in {"lost": 0, **losses}.items():  # from 0 on, or the first loss would be no increase
            lost.add_metric([*labels.values(), end, reason], number)
    return lost


def refused(name: str, seconds: Mapping[str, float], **labels: str) -> Metric:
    """Return for how long each end has refused our connections."""
    family = GaugeMetricFamily(
        name, "For how long this end has refused every connection; 0 when it does not", labels=[*labels, "end"]
    )
    for end, number in seconds.items():
        family.add_metric([*labels.values(), end], number)
    return family


def counted(name: str, about: str, label: str, numbers: Iterable[tuple[str, int]], **labels: str) -> Metric:
    family = CounterMetricFamily(name, about, labels=[*labels, label])
    for value, number in numbers:
        family.add_metric([*labels.values(), value], number)
    return family


def histogram(name: str, about: str, values: Histogram, **labels: str) -> Metric:
    buckets = [("+Inf" if bound == inf else str(bound), number) for bound, number in values.buckets()]
    family = HistogramMetricFamily(name, about, labels=list(labels))
    family.add_metric(list(labels.values()), buckets, values.total)
    return family


def _state(node: NodeSnapshot) -> Iterator[Metric]:
    yield GaugeMetricFamily("outbox_ready", "1 while this relay can deliver, as /readyz tells", int(node.ready))
    yield GaugeMetricFamily("outbox_stalled", "1 while messages wait and do not settle", int(node.stalled))
    yield GaugeMetricFamily("outbox_lanes_held", "Lanes that this relay carries", node.lanes)
    yield GaugeMetricFamily(
        "outbox_in_flight_messages", "Messages sent by this relay and not yet settled", node.in_flight
    )


def _outcomes(node: NodeSnapshot) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "outbox_published", "Messages that this relay sent, and that are confirmed and marked", node.published
    )
    ended = "Attempts of this relay that ended without a confirm"
    yield counted("outbox_publish_failures", ended, "reason", node.failures.items())
    for outcome in (Outcome.RETURNED, Outcome.NACKED, Outcome.UNKNOWN):
        yield CounterMetricFamily(f"outbox_{outcome}", f"Attempts that ended as {outcome}", node.failures[outcome])
    unbound = "Messages for which no queue was bound, by what became of them"
    yield counted("outbox_unroutable", unbound, "policy", node.unroutable.items())
    yield histogram("outbox_publish_duration_seconds", "From the write to the confirm", node.confirm_times)
    yield histogram(
        "outbox_end_to_end_latency_seconds", "From the writer's transaction to the mark", node.delivery_times
    )
    yield CounterMetricFamily("outbox_sweep_finds", "Rows that only a sweep has found", node.sweep_finds)


def _troubles(node: NodeSnapshot) -> Iterator[Metric]:
    yield reconnects("outbox_reconnects", node.broker_losses, node.database_losses)
    yield refused("outbox_connection_refused_seconds", node.refused_seconds)
    yield CounterMetricFamily(
        "outbox_broker_blocked_seconds", "For how long the broker has blocked this relay", node.blocked_seconds
    )


def _backlog(counts: Counts) -> Iterator[Metric]:
    yield GaugeMetricFamily("outbox_pending_messages", "Rows that wait in the table", counts.pending)
    yield GaugeMetricFamily(
        "outbox_oldest_pending_age_seconds",
        "How long the oldest row that is due has waited; 0 when no row waits",
        counts.oldest_pending_age,
    )
    yield GaugeMetricFamily("outbox_parked_messages", "Rows that wait for an operator", counts.parked)
    yield GaugeMetricFamily(
        "outbox_parked_held_messages", "Of these: rows that wait behind another one of their key", counts.parked_held
    )
    yield GaugeMetricFamily("outbox_quarantined_routes", "Routes that do not work", counts.quarantined_routes)
    yield GaugeMetricFamily("outbox_paused_routes", "Routes that an operator has paused", counts.paused_routes)
    yield GaugeMetricFamily(
        "outbox_quarantined_messages", "Rows that wait for such a route, or for a paused one", counts.quarantined
    )
    yield GaugeMetricFamily("outbox_paused_lanes", "Lanes that an operator has paused", counts.paused_lanes)
    overdue = GaugeMetricFamily(
        "outbox_retention_overdue_days", "Days that are older than is kept, and not dropped", labels=["table"]
    )
    for table, days in counts.overdue_days.items():
        overdue.add_metric([table], days)
    yield overdue
    yield from _batches(counts.batches)
    if counts.unarchived_days is not None:
        yield GaugeMetricFamily(
            "outbox_unarchived_days", "Ended days of sent rows that are not archived", counts.unarchived_days
        )


def _batches(batches: Batches) -> Iterator[Metric]:
    for name, about, number in (
        ("unfinished_batches", "Batches of Spark that are begun in pieces and not committed", batches.unfinished),
        ("unfinished_batch_age_seconds", "How long ago the oldest of these was begun", batches.oldest_age),
        ("unfinished_batch_idle_seconds", "How long one of these has written no piece", batches.longest_idle),
        ("recent_batches", "Batches of Spark that were committed within the last hour", batches.recent),
        ("recent_batch_rows", "Rows that these have written", batches.recent_rows),
        ("recent_batch_seconds", "How long the slowest of these took", batches.recent_seconds),
        ("recent_batch_repeats", "How often these came again, and were recognised", batches.recent_repeats),
    ):
        yield GaugeMetricFamily(f"outbox_{name}", about, number)
