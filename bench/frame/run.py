"""One run of a bench: its command line, its rounds, its tables, its exit code, and what it leaves in bench/results/.

A bench is a function `measure(*, options, run: Bench)` in bench/NAME.py. It starts what it needs and says what each
side does in one round. The frame lets sides alternate, prints medians with spreads, and divides by the reference.
"""

import inspect
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NoReturn

from cyclopts import App, Parameter, validators
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable

from bench.frame.error import BenchmarkError
from relay.config.keys import all_keys
from relay.testing.servers.process import ServerError

Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
CountOrNone = Annotated[int, Parameter(validator=validators.Number(gte=0))]
Positive = Annotated[float, Parameter(validator=validators.Number(gt=0))]
PositiveOrNone = Annotated[float, Parameter(validator=validators.Number(gte=0))]

RESULTS = Path(__file__).parents[1] / "results"
VARIABLES = [variable for key in all_keys() if key.path[0] == "relay" for variable in key.variables]

Figures = Mapping[str, float]  # what one side measured in one round; those called `lost` make the bench fail
Line = tuple[Sequence[float], Sequence[float]]


class Shown(StrEnum):
    """What a column shows of the rounds."""

    SPREAD = "median (lowest - highest)"
    MEDIAN = "median"
    HIGHEST = "highest"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        is_ratio: divide each figure by that of the reference in the same round.
        reference: another side than the first one that is measured with this one.
    """

    title: str
    figure: str
    digits: int = 0
    shown: Shown = Shown.SPREAD
    is_ratio: bool = False
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one side measured in one round."""

    side: str
    round: int
    figures: Figures
    reference: str


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds and how far they lie apart."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))

    def text(self, digits: int, shown: Shown) -> str:
        if shown is Shown.HIGHEST:
            return f"{self.highest:,.{digits}f}"
        middle = f"{self.median:,.{digits}f}"
        if shown is Shown.MEDIAN or self.lowest == self.highest:
            return middle
        return f"{middle} ({self.lowest:,.{digits}f} - {self.highest:,.{digits}f})"


class ResultTable:
    """Sides that are measured by turns: a row each."""

    def __init__(self, run: "Run", title: str, columns: Sequence[Column], *, is_drawn: bool) -> None:
        self.title, self.columns, self.is_drawn = title, columns, is_drawn
        self.taken: list[Taken] = []
        self._figures: dict[tuple[str, int], Figures] = {}  # by side and round
        self._run = run

    def measure(self, sides: Mapping[str, Callable[[], Figures]], rounds: int, *, warm_up: int = 0) -> None:
        """Let each side measure `rounds` times, and before that `warm_up` times that do not count.

        The first side is the reference. Each round starts with another side.
        """
        for number, side in self._run.turns([*sides], rounds, warm_up=warm_up):
            figures = sides[side]()
            if number > 0:
                self.add(side, figures, number, reference=next(iter(sides)))

    def add(self, side: str, figures: Figures, number: int | None = None, *, reference: str = "") -> None:
        """Take what was measured elsewhere, and print it as the figures of a round, where there are rounds."""
        self.taken.append(Taken(side, number or 1, figures, reference))
        self._figures[side, number or 1] = figures
        if number is not None:
            column = self.columns[0]
            lost = f", lost {figures['lost']:.0f}" if "lost" in figures else ""
            value = f"{figures[column.figure]:,.{column.digits}f}"
            self._run.console.print(f"round {number}  {side}: {column.title} {value}{lost}", soft_wrap=True)

    def spreads(self) -> dict[str, list[Spread | None]]:
        """Return the columns of each side; None where nothing was measured."""
        return {
            side: [self._spread(column, side) for column in self.columns]
            for side in dict.fromkeys(one.side for one in self.taken)
        }

    def lost(self, side: str | None = None) -> float | None:
        """Return the sum of the messages that a side, or all of them, lost; None if nothing was counted."""
        counts = [one.figures["lost"] for one in self.taken if "lost" in one.figures and side in {None, one.side}]
        return sum(counts) if counts else None

    def show(self) -> None:
        """Print it."""
        shown = TerminalTable(box=box.SIMPLE)
        has_lost = self.lost() is not None
        for number, title in enumerate(["", *(one.title for one in self.columns), *(["lost"] if has_lost else [])]):
            shown.add_column(title, justify="right" if number else "left", no_wrap=number == 0)
        for side, spreads in self.spreads().items():
            cells = [
                one.text(column.digits, column.shown) if one else "-"
                for column, one in zip(self.columns, spreads, strict=True)
            ]
            lost = self.lost(side)
            shown.add_row(side, *cells, *([f"{lost:.0f}" if lost is not None else "-"] if has_lost else []))
        counts = Counter(one.side for one in self.taken).values()
        rounds = f"{max(counts)}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
        about = f"; medians of {rounds} rounds (lowest - highest)" if max(counts) > 1 else ""
        self._run.console.print(f"\n{self.title}{about}", style="bold")
        self._run.console.print(shown)

    def draw(self, axes: Axes) -> None:
        """Draw the first column: one bar a side, with its spread."""
        column = self.columns[0]
        bars = {side: spreads[0] for side, spreads in self.spreads().items() if spreads[0]}
        medians = [bar.median for bar in bars.values()]
        below = [bar.median - bar.lowest for bar in bars.values()]
        above = [bar.highest - bar.median for bar in bars.values()]
        drawn = axes.barh(list(bars), medians, xerr=(below, above), capsize=3, color="#4477aa", ecolor="#222222")
        axes.bar_label(drawn, fmt=f"{{:,.{column.digits}f}}", padding=4)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set_xlabel(column.title)
        axes.set_title(self.title, loc="left", fontsize="small")

    def as_json(self) -> dict[str, Any]:
        titles = [column.title for column in self.columns]
        summary = {
            side: {title: asdict(one) for title, one in zip(titles, spreads, strict=True) if one}
            for side, spreads in self.spreads().items()
        }
        rounds = [{"side": one.side, "round": one.round, **one.figures} for one in self.taken]
        return {"summary": summary, "rounds": rounds}

    def _spread(self, column: Column, side: str) -> Spread | None:
        of_side = [self._value(column, one) for one in self.taken if one.side == side]
        values = [value for value in of_side if value is not None]
        return Spread.of(values) if values else None

    def _value(self, column: Column, one: Taken) -> float | None:
        value = one.figures.get(column.figure)
        if value is None or not column.is_ratio:
            return value
        reference = self._figures.get((column.reference or one.reference, one.round), {}).get(column.figure)
        return value / reference if reference else None


class Run:
    """One run: what was measured so far, and the terminal."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.console = Console() if sys.stdout.isatty() else Console(width=160)  # wide enough for every table
        self._name, self._options = name, options
        self._tables: list[ResultTable] = []
        self._lines: dict[str, dict[str, Line]] = {}
        self._failures: list[str] = []

    def status(self, text: str) -> AbstractContextManager[Any]:
        """Show what is being done until the end of the block."""
        return self.console.status(text)

    def table(self, title: str, *columns: Column, is_drawn: bool = True) -> ResultTable:
        """Return a new table, which is printed at the end when it has a row."""
        self._tables.append(table := ResultTable(self, title, columns, is_drawn=is_drawn))
        return table

    def turns(self, sides: Sequence[str], rounds: int, *, warm_up: int = 0) -> Iterator[tuple[int, str]]:
        """Go through all sides in each round, which starts with another one; the warm-up has numbers up to 0."""
        for number in range(1 - warm_up, rounds + 1):
            first = (number - 1) % len(sides)
            for side in [*sides[first:], *sides[:first]]:
                with self.status(f"round {number} of {rounds}: {side}" if number > 0 else f"warming up: {side}"):
                    yield number, side

    def draw(self, title: str, **lines: Line) -> None:
        """Add lines to the plot, each of minutes and of a figure then."""
        self._lines[title] = lines

    def fail(self, reason: str) -> None:
        """Let the bench exit with 1 in the end, after it has reported everything."""
        self._failures.append(reason)

    def finish(self) -> int:
        """Print the tables, write JSON and a plot; return 1 when a message was lost or the bench fails, else 0."""
        tables = [table for table in self._tables if table.taken]
        for table in tables:
            table.show()
        counts = [lost for table in tables if (lost := table.lost()) is not None]
        if counts:
            self.console.print(f"lost messages: {sum(counts):.0f}")
        for reason in self._failures:
            self.console.print(reason)
        if not tables:
            raise BenchmarkError("the options leave out every measurement")
        RESULTS.mkdir(exist_ok=True)
        for file in (self._write_json(tables), self._plot([table for table in tables if table.is_drawn])):
            self.console.print(f"written: {os.path.relpath(file)}", soft_wrap=True)
        return 1 if sum(counts) or self._failures else 0

    def _write_json(self, tables: Sequence[ResultTable]) -> Path:
        file = RESULTS / f"{self._name}.json"
        about = {
            "benchmark": self._name,
            "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {
                "cores": os.cpu_count(),
                "processor": _processor(),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            # What was tried out: the relay takes these from the caller's environment.
            "settings": {variable: os.environ[variable] for variable in VARIABLES if variable in os.environ},
            "options": self._options,
            "tables": {table.title: table.as_json() for table in tables},
            "failures": self._failures,
        }
        file.write_text(json.dumps(about, indent=2) + "\n")
        return file

    def _plot(self, tables: Sequence[ResultTable]) -> Path:
        file = RESULTS / f"{self._name}.png"
        heights = [1 + 0.5 * len(table.spreads()) for table in tables] + [3.0] * len(self._lines)
        figure = Figure(figsize=(10, sum(heights)), layout="constrained")
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for table, axes in zip(tables, panels, strict=False):
            table.draw(axes)
        for (title, lines), axes in zip(self._lines.items(), panels[len(tables) :], strict=True):
            for name, (x, y) in lines.items():
                axes.plot(x, y, ".-", label=name)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("minutes")
            axes.set_title(title, loc="left", fontsize="small")
            axes.legend(loc="lower right")
        figure.savefig(file, dpi=120)
        return file


Bench = Annotated[Run, Parameter(parse=False)]  # the last parameter of each bench; the frame gives it


def main(bench: Callable[..., None]) -> NoReturn:
    """Run a bench from the command line and exit: with 1 and one line when it cannot measure, with 130 after Ctrl-C."""
    name = Path(inspect.getfile(bench)).stem
    app = App(name=f"python -m bench.{name}", version_flags=[])
    app.default(bench)
    command, bound, _ = app.parse_args(sys.argv[1:])
    if command != bench:  # --help
        sys.exit(command(*bound.args, **bound.kwargs))
    bound.apply_defaults()
    options = {name: value for name, value in bound.arguments.items() if name != "run"}
    run = Run(name, options)
    try:
        bench(**options, run=run)
        sys.exit(run.finish())
    except (BenchmarkError, ServerError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all do not exceed."""
    return ascending[max(0, -int(-share * len(ascending) // 1) - 1)]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
