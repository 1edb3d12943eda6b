"""The picture of bench/latency: how the waits are distributed, and the writers' rates."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.frame.report import save_figure
from bench.latency_case import Latencies, WriterRates

SHORTEST = 0.1  # ms; a logarithmic axis has no zero


def plot(latencies: Sequence[Latencies], rates: Sequence[WriterRates]) -> Path:
    """Draw what was measured; give the file's path."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_latencies(left, latencies)
    _draw_rates(right, rates)
    return save_figure("latency", figure)


def _draw_latencies(axes: Axes, rounds: Sequence[Latencies]) -> None:
    for number, one in enumerate(rounds):
        for waits, colour, name in (
            (one.from_returned, "#4477aa", "from COMMIT's answer"),
            (one.from_asked, "#cc6677", "from COMMIT's request"),
        ):
            shares = [(rank + 1) / len(waits) for rank in range(len(waits))]
            axes.plot([max(wait, SHORTEST) for wait in waits], shares, color=colour, label=None if number else name)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds, one line a round")
    axes.set_ylabel("share of the rows")
    axes.set_title("Commit to confirm", loc="left")
    axes.grid(visible=True, which="major", alpha=0.3)
    if rounds:
        axes.legend(loc="lower right")


def _draw_rates(axes: Axes, rounds: Sequence[WriterRates]) -> None:
    numbers = range(1, len(rounds) + 1)
    axes.plot(numbers, [one.trigger_on for one in rounds], "o-", color="#4477aa", label="with the wake-up trigger")
    axes.plot(numbers, [one.trigger_off for one in rounds], "o--", color="#999999", label="without")
    axes.set_xticks(list(numbers))
    axes.set_ylim(0, 1.2 * max((max(one.trigger_on, one.trigger_off) for one in rounds), default=1.0))
    axes.set_xlabel("round")
    axes.set_ylabel("commits a second")
    axes.set_title("Writers flat out", loc="left")
    if rounds:
        axes.legend(loc="lower right")
