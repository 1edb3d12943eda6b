"""Write the dashboards for Grafana next to this file: python -m config.grafana.generate.

What is counted in the table every relay serves alike: max, not sum. docs/metrics.md explains the metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FOLDER = Path(__file__).parent
SOURCE = DataSourceRef(type_val="prometheus", uid="$source")
RATE = "[$__rate_interval]"
BY_CONSUMER = "by (consumer, queue)"
OF_CONSUMER = "{{consumer}} {{queue}}"


@dataclass(frozen=True, slots=True)
class Graph:
    """Expressions over time, each with its legend."""

    title: str
    expressions: Sequence[tuple[str, str]]
    unit: str = "short"


@dataclass(frozen=True, slots=True)
class Number:
    """One value, as it is now."""

    title: str
    expression: str
    unit: str = "short"


Panel = Graph | Number
Rows = dict[str, Sequence[Panel]]


def quantiles(metric: str, by: str = "", legend: str = "") -> list[tuple[str, str]]:
    """Return the median and the 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return [
        (f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{RATE})))", f"p{q * 100:g} {legend}".strip())
        for q in (0.5, 0.99)
    ]


def per_second(metric: str, by: str, legend: str) -> tuple[str, str]:
    return (f"sum by ({by}) (rate({metric}{RATE}))", legend)


OVERVIEW: Rows = {
    "Is all well?": [
        Number("Relays that are ready", "sum(outbox_ready)"),
        Number("Oldest due message", "max(outbox_oldest_pending_age_seconds)", "s"),
        Number("Pending messages", "max(outbox_pending_messages)"),
        Number("Parked messages", "max(outbox_parked_messages)"),
        Number("Routes that do not work", "max(outbox_quarantined_routes)"),
        Number("Confirmed within 5 s, last hour", "1 - outbox:confirmed_late:ratio1h", "percentunit"),
    ],
    "From the table to the consumers": [
        Graph("Published", [(f"sum(rate(outbox_published_total{RATE}))", "messages a second")], "mps"),
        Graph(
            "Backlog", [("max(outbox_pending_messages)", "pending"), ("sum(outbox_in_flight_messages)", "in flight")]
        ),
        Graph("From commit to mark", quantiles("outbox_end_to_end_latency_seconds"), "s"),
        Graph("Waiting in the queues", [(f"max {BY_CONSUMER} (outbox_consumer_queue_ready_messages)", OF_CONSUMER)]),
        Graph("Applied", [per_second("outbox_consumer_applied_total", "consumer, queue", OF_CONSUMER)], "mps"),
        Graph(
            "Dead letters",
            [(f"sum by (queue, reason) (increase(outbox_consumer_dead_letters_total{RATE}))", "{{queue}} {{reason}}")],
        ),
    ],
}

DELIVERY: Rows = {
    "Speed": [
        Graph("Published by relay", [per_second("outbox_published_total", "instance", "{{instance}}")], "mps"),
        Graph("From write to confirm", quantiles("outbox_publish_duration_seconds"), "s"),
        Graph("From commit to mark", quantiles("outbox_end_to_end_latency_seconds"), "s"),
        Graph("In flight", [("outbox_in_flight_messages", "{{instance}}")]),
        Graph("Oldest due message", [("max(outbox_oldest_pending_age_seconds)", "age")], "s"),
        Graph("Rows that only a sweep found", [(f"sum(rate(outbox_sweep_finds_total{RATE}))", "rows a second")]),
    ],
    "What the broker refuses": [
        Graph(
            "Attempts without a confirm", [per_second("outbox_publish_failures_total", "reason", "{{reason}}")], "mps"
        ),
        Graph(
            "Returned, nacked, unknown",
            [(f"sum(rate(outbox_{name}_total{RATE}))", name) for name in ("returned", "nacked", "unknown")],
            "mps",
        ),
        Graph("Nobody is bound", [per_second("outbox_unroutable_total", "policy", "{{policy}}")], "mps"),
        Graph(
            "Parked",
            [
                ("max(outbox_parked_messages)", "parked"),
                ("max(outbox_parked_held_messages)", "of these, behind another one"),
            ],
        ),
        Graph(
            "Quarantine",
            [
                ("max(outbox_quarantined_routes)", "routes"),
                ("max(outbox_paused_routes)", "paused routes"),
                ("max(outbox_quarantined_messages)", "messages"),
            ],
        ),
        Graph(
            "Blocked by the broker",
            [(f"rate(outbox_broker_blocked_seconds_total{RATE})", "{{instance}}")],
            "percentunit",
        ),
        Graph("Refused connections", [("max by (end) (outbox_connection_refused_seconds)", "{{end}}")], "s"),
    ],
}

CONSUMERS: Rows = {
    "State": [
        Graph(
            "Processes",
            [
                (f"sum {BY_CONSUMER} (outbox_consumer_{name})", f"{name} {OF_CONSUMER}")
                for name in ("ready", "stalled", "paused")
            ],
        ),
        Graph("Waiting in the queue", [(f"max {BY_CONSUMER} (outbox_consumer_queue_ready_messages)", OF_CONSUMER)]),
        Graph(
            "Age when applied", [(f"max {BY_CONSUMER} (outbox_consumer_last_applied_age_seconds)", OF_CONSUMER)], "s"
        ),
        Graph("Held", [(f"max {BY_CONSUMER} (outbox_consumer_held_messages)", OF_CONSUMER)]),
        Graph(
            "In hand",
            [
                (f"sum {BY_CONSUMER} (outbox_consumer_unacknowledged_messages)", f"unacknowledged {OF_CONSUMER}"),
                (f"sum {BY_CONSUMER} (outbox_consumer_handlers_in_flight)", f"handlers {OF_CONSUMER}"),
            ],
        ),
        Graph("Transactions", quantiles("outbox_consumer_process_duration_seconds", "queue", "{{queue}}"), "s"),
    ],
    "What became of the messages": [
        Graph(
            "Delivered and settled",
            [
                per_second(f"outbox_consumer_{name}_total", "consumer, queue", f"{name} {OF_CONSUMER}")
                for name in ("deliveries", "redeliveries", "acknowledged", "given_back")
            ],
            "mps",
        ),
        Graph(
            "Applied and known",
            [
                per_second(f"outbox_consumer_{name}_total", "consumer, queue", f"{name} {OF_CONSUMER}")
                for name in ("applied", "duplicates")
            ],
            "mps",
        ),
        Graph(
            "Failures",
            [
                per_second("outbox_consumer_failures_total", "consumer, queue", f"failed {OF_CONSUMER}"),
                per_second("outbox_consumer_repeated_total", "consumer, queue", f"repeated {OF_CONSUMER}"),
            ],
            "mps",
        ),
        Graph("Retries", [per_second("outbox_consumer_retries_total", "queue, step", "{{queue}} {{step}} s")], "mps"),
        Graph(
            "Dead letters",
            [per_second("outbox_consumer_dead_letters_total", "queue, reason", "{{queue}} {{reason}}")],
            "mps",
        ),
        Graph(
            "Overload",
            [
                per_second("outbox_consumer_overloads_total", "consumer, queue", f"overloads {OF_CONSUMER}"),
                per_second("outbox_consumer_paused_seconds_total", "consumer, queue", f"paused {OF_CONSUMER}"),
            ],
        ),
        Graph(
            "Connections lost",
            [per_second("outbox_consumer_reconnects_total", "end, reason", "{{end}} {{reason}}")],
        ),
        Graph("Refused connections", [("max by (end) (outbox_consumer_connection_refused_seconds)", "{{end}}")], "s"),
    ],
}

OPERATIONS: Rows = {
    "Objectives": [
        Graph(
            "Budget used: age of the oldest due message (1 is as fast as allowed)",
            [(f"avg_over_time(outbox:age_missed:bool[{window}]) / 0.01", window) for window in ("1h", "6h", "3d")],
        ),
        Graph(
            "Budget used: confirmed within 5 s (1 is as fast as allowed)",
            [(f"outbox:confirmed_late:ratio{window} / 0.01", window) for window in ("1h", "6h", "3d")],
        ),
    ],
    "Relays": [
        Graph("Lanes", [("outbox_lanes_held", "{{instance}}"), ("max(outbox_paused_lanes)", "paused")]),
        Graph(
            "Ready and stalled", [("outbox_ready", "ready {{instance}}"), ("outbox_stalled", "stalled {{instance}}")]
        ),
        Graph("Connections lost", [per_second("outbox_reconnects_total", "end, reason", "{{end}} {{reason}}")]),
        Graph("Releases", [("count by (version) (outbox_build_info)", "{{version}}")]),
    ],
    "Days": [
        Graph("Older than is kept", [("max by (table) (outbox_retention_overdue_days)", "{{table}}")]),
        Graph("Not archived", [("max(outbox_unarchived_days)", "days")]),
    ],
    "Batches of Spark": [
        Graph("Begun and not committed", [("max(outbox_unfinished_batches)", "batches")]),
        Graph(
            "Age of what is not committed",
            [
                ("max(outbox_unfinished_batch_age_seconds)", "since it was begun"),
                ("max(outbox_unfinished_batch_idle_seconds)", "since its last piece"),
            ],
            "s",
        ),
        Graph(
            "Committed within the last hour",
            [
                ("max(outbox_recent_batches)", "batches"),
                ("max(outbox_recent_batch_rows)", "rows"),
                ("max(outbox_recent_batch_repeats)", "came again"),
            ],
        ),
        Graph("Slowest within the last hour", [("max(outbox_recent_batch_seconds)", "took")], "s"),
    ],
    "Processes": [
        Graph("CPU", [(f"rate(process_cpu_seconds_total{RATE})", "{{job}} {{instance}}")], "percentunit"),
        Graph("Memory", [("process_resident_memory_bytes", "{{job}} {{instance}}")], "bytes"),
        Graph(
            "Open files, of those allowed",
            [("process_open_fds / process_max_fds", "{{job}} {{instance}}")],
            "percentunit",
        ),
        Graph("Running for", [("time() - process_start_time_seconds", "{{job}} {{instance}}")], "s"),
    ],
}

DASHBOARDS = {
    "outbox-overview": ("Outbox: overview", OVERVIEW),
    "outbox-delivery": ("Outbox: delivery", DELIVERY),
    "outbox-consumers": ("Outbox: consumers", CONSUMERS),
    "outbox-operations": ("Outbox: operations", OPERATIONS),
}


def as_json(uid: str) -> str:
    """Return the dashboard as Grafana imports it."""
    title, rows = DASHBOARDS[uid]
    board = (
        Dashboard(title)
        .uid(uid)
        .tags(["outbox"])
        .refresh("30s")
        .time("now-3h", "now")
        .with_variable(DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    ids = count(1)
    for heading, panels in rows.items():
        board = board.with_row(Row(heading).id(next(ids)))
        for panel in panels:
            drawn = _number(panel) if isinstance(panel, Number) else _graph(panel)
            board = board.with_panel(drawn.id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


def _number(panel: Number) -> stat.Panel:
    return (
        stat.Panel()
        .title(panel.title)
        .datasource(SOURCE)
        .unit(panel.unit)
        .graph_mode(BigValueGraphMode.AREA)
        .height(5)
        .span(4)
        .with_target(_query("A", panel.expression, ""))
    )


def _graph(panel: Graph) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    graph = (
        timeseries.Panel()
        .title(panel.title)
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0)
        .fill_opacity(10)
        .legend(legend.show_legend(True))
        .height(8)
        .span(12)
    )
    for letter, (expression, name) in zip(ascii_uppercase, panel.expressions, strict=False):
        graph = graph.with_target(_query(letter, expression, name))
    return graph


def _query(letter: str, expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(legend).range()


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(as_json(name))
