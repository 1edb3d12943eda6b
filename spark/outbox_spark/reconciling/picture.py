"""The picture of a reconciliation: the sums of both sides by day, and by how much they differ."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg")


def draw(days: Sequence[dict[str, Any]], path: Path, *, table: str, event_types: Sequence[str]) -> None:
    """Write the picture. Days are those of the report; one that is unknown is left out."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # needed for a picture only

    known = [each for each in days if each["day"] is not None]
    at = [datetime.fromisoformat(each["day"]) for each in known]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.bar(at, [float(each["amount_of_rows"]) for each in known], width=0.8, color="#4477aa", label=table)
    half = timedelta(hours=9.6)  # as wide as the bars, however many there are
    above.hlines(
        [float(each["amount_of_events"]) for each in known],
        [each - half for each in at],
        [each + half for each in at],
        linewidth=2.5,
        color="#222222",
        label=f"events: {', '.join(event_types)}",
    )
    above.set_title("Sums by day", loc="left")
    above.set_ylim(bottom=0)
    above.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    differences = [float(each["difference"]) for each in known]
    colours = ["#cc6677" if each < 0 else "#ddaa33" for each in differences]
    below.bar(at, differences, width=0.8, color=colours)
    below.axhline(0, color="#222222", linewidth=0.8)
    wrong = [each for each in known if float(each["difference"])]
    below.set_title(f"Events less rows: {len(wrong)} of {len(known)} days differ", loc="left")
    below.margins(y=0.3)
    for each in wrong if len(wrong) <= 20 else ():
        value = float(each["difference"])
        below.annotate(
            f"{value:+,.2f}",
            (datetime.fromisoformat(each["day"]), value),
            xytext=(0, 4 if value > 0 else -4),
            textcoords="offset points",
            ha="center",
            va="bottom" if value > 0 else "top",
        )
    for axes in (above, below):
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(visible=True, axis="y", alpha=0.3)
    labelled = at[:: max(1, len(at) // 12)]
    below.set_xticks(labelled, [f"{each:%Y-%m-%d}" for each in labelled])
    figure.autofmt_xdate()
    figure.savefig(path, dpi=120)
