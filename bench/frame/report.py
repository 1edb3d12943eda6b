"""What every benchmark leaves: a table on the terminal, figures as JSON, a plot."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from relay.config.keys import all_keys

RESULTS = Path(__file__).parents[1] / "results"
VARIABLES = [variable for key in all_keys() if key.path[0] == "relay" for variable in key.variables]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds and how far they lie apart."""

    median: float
    lowest: float
    highest: float

    def shown(self, digits: int = 0) -> str:
        return f"{self.median:,.{digits}f}"

    def range_shown(self, digits: int = 0) -> str:
        return f"{self.lowest:,.{digits}f}-{self.highest:,.{digits}f}"


def open_console() -> Console:
    """Give the terminal, or lines wide enough for every table when the output goes elsewhere."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def quantile(ascending: Sequence[float], share: float) -> float:
    """Give the smallest value that at least `share` of all do not exceed."""
    return ascending[max(0, -int(-share * len(ascending) // 1) - 1)]


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column names the case, the others are figures."""
    table = Table(box=box.SIMPLE)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    console.print(f"\n{title}", style="bold")
    console.print(table)


def write_json(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures with the machine they were taken on; give the file's path."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    about = {
        "benchmark": name,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "processor": _processor(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        # What was tried out: the relay takes these from the caller's environment.
        "settings": {variable: os.environ[variable] for variable in VARIABLES if variable in os.environ},
    }
    file.write_text(json.dumps({**about, **figures}, indent=2) + "\n")
    return file


def plot_bars(name: str, title: str, unit: str, bars: dict[str, Spread], *, digits: int = 0) -> Path:
    """Draw one bar a case, with its spread over the rounds; give the file's path."""
    figure = Figure(figsize=(8, 1 + 0.6 * len(bars)), layout="constrained")
    axes = figure.subplots()
    medians = [bar.median for bar in bars.values()]
    below = [bar.median - bar.lowest for bar in bars.values()]
    above = [bar.highest - bar.median for bar in bars.values()]
    drawn = axes.barh(list(bars), medians, xerr=(below, above), capsize=3, color="#4477aa", ecolor="#222222")
    axes.bar_label(drawn, fmt=f"{{:,.{digits}f}}", padding=4)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left")
    return save_figure(name, figure)


def save_figure(name: str, figure: Figure) -> Path:
    """Write a figure beside the JSON file of the same name; it needs no display."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.png"
    figure.savefig(file, dpi=120)
    return file


def print_files(console: Console, *files: Path) -> None:
    for file in files:
        console.print(f"written: {os.path.relpath(file)}", soft_wrap=True)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
