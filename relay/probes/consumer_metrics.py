"""The metrics of a consumer. docs/metrics.md lists them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from relay.consume.classify import FailureReason
from relay.consume.counters import ConsumerSnapshot
from relay.probes.metrics import counted, histogram, reconnects, refused


def metrics(consumer: ConsumerSnapshot, waiting: int | None) -> Iterator[Metric]:
    """Return the metrics of a consumer at one moment; nothing waiting: the broker does not say how many do."""
    labels = {"consumer": consumer.consumer, "queue": consumer.queue}
    counters = consumer.counters
    for name, about, gauge in (
        ("ready", "1 while this consumer works, as /readyz tells", int(consumer.ready)),
        ("stalled", "1 while messages are in hand and do not settle", int(consumer.stalled)),
        ("paused", "1 while an overload pauses it", int(consumer.paused)),
        ("queue_ready_messages", "Messages that wait in the queue", waiting),
        ("unacknowledged_messages", "Messages that this consumer has, and has not settled", counters.unacknowledged),
        ("handlers_in_flight", "Transactions that run", counters.in_flight),
        ("held_messages", "Messages that wait in the table, for their next try or behind such a one", counters.held),
        ("last_applied_age_seconds", "Age of the message last applied, when it was", counters.last_age),
    ):
        if gauge is not None:  # absent is better than a number that nobody knows
            yield _one(GaugeMetricFamily, name, about, number=gauge, labels=labels)
    for name, about, count in (
        ("deliveries", "Messages that the broker has delivered", counters.deliveries),
        ("redeliveries", "Of these: had been delivered before, to any consumer", counters.redeliveries),
        ("acknowledged", "Messages that were settled", counters.acknowledged),
        ("given_back", "Messages that were not settled when their channel ended", counters.given_back),
        ("applied", "Messages that were committed for the first time", counters.applied),
        ("duplicates", "Messages that the inbox knew", counters.duplicates),
        ("failures", "Tries that a handler failed", counters.failed),
        ("repeated", "Tries that ended by a stale session or another transaction; no attempt", counters.repeated),
        ("overloads", "Tries that ended by an overload", counters.overloads),
        ("paused_seconds", "For how long overloads have paused it", counters.paused_seconds),
    ):
        yield _one(CounterMetricFamily, name, about, number=count, labels=labels)
    # From 0 on, or the first would be no increase.
    retries = [(f"{step:g}", counters.retried[step]) for step in consumer.steps]
    yield counted("outbox_consumer_retries", "Tries that were put off, by the longest wait", "step", retries, **labels)
    dead = [(reason.value, counters.dead_letters[reason]) for reason in FailureReason]
    yield counted("outbox_consumer_dead_letters", "Messages that were given up", "reason", dead, **labels)
    yield reconnects("outbox_consumer_reconnects", counters.broker_losses, counters.database_losses, **labels)
    yield refused("outbox_consumer_connection_refused_seconds", consumer.refused_seconds, **labels)
    yield histogram(
        "outbox_consumer_process_duration_seconds", "Transactions, handlers included", counters.times, **labels
    )


def _one(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, about: str, *, number: float, labels: dict[str, str]
) -> Metric:
    family = kind(f"outbox_consumer_{name}", about, labels=list(labels))
    family.add_metric(list(labels.values()), number)
    return family
