"""The picture of bench/soak: memory, table, waits and messages in flight over the time of the run."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.frame.report import save_figure
from bench.soak_case import Sample, Soaked

Line = tuple[str, Callable[[Sample], float]]


def plot(soaked: Soaked, span: float) -> Path:
    """Draw what was measured; give the file's path."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    (memory, table), (waits, flight) = figure.subplots(2, 2, sharex=True)
    samples = soaked.samples
    _draw(memory, "Memory, MiB", samples, ("relay", lambda one: one.relay), ("RabbitMQ", lambda one: one.rabbitmq))
    _draw(table, "Partition of pending rows, MiB", samples, ("with its indexes", lambda one: one.pending))
    _draw(flight, "Messages in flight", samples, ("at the heartbeat", lambda one: one.in_flight))
    middles = [(number + 0.5) * span / 60 for number in range(len(soaked.minutes))]
    waits.plot(middles, [one.p50 for one in soaked.minutes], "o-", color="#4477aa", label="p50")
    waits.plot(middles, [one.p99 for one in soaked.minutes], "o-", color="#cc6677", label="p99")
    waits.set_title("Commit to confirm, ms", loc="left")
    waits.set_ylim(bottom=0)
    waits.legend(loc="upper right")
    for axes in (waits, flight):
        axes.set_xlabel("minutes")
    return save_figure("soak", figure)


def _draw(axes: Axes, title: str, samples: Sequence[Sample], *lines: Line) -> None:
    for (name, value), colour in zip(lines, ("#4477aa", "#999999"), strict=False):
        axes.plot([one.at / 60 for one in samples], [value(one) for one in samples], color=colour, label=name)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    axes.legend(loc="lower right")
