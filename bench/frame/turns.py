"""Several ways to do the same work, by turns, each next to the first of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from bench.frame import report


@dataclass(frozen=True, slots=True)
class Measured:
    """One way, once."""

    round: int
    way: str
    seconds: float
    rate: float  # rows a second


@dataclass(frozen=True, slots=True)
class Titles:
    """What the table and the plot say."""

    table: str
    reference: str
    plot: str
    unit: str  # of a rate


def take_turns(
    console: Console, ways: Mapping[str, Callable[[], float]], *, rounds: int, rows: Mapping[str, int]
) -> Sequence[Measured]:
    """Measure each way `rounds` times, after a round to warm up; each round begins with another one.

    Args:
        ways: do their work once and give the seconds that it took.
        rows: of each way.
    """
    measured: list[Measured] = []
    for number in range(rounds + 1):
        first = number % len(ways)
        for way in [*ways][first:] + [*ways][:first]:
            with console.status(f"round {number} of {rounds}: {way}"):
                seconds = ways[way]()
            if number > 0:
                measured.append(Measured(number, way, seconds, rows[way] / seconds))
                console.print(f"round {number}/{rounds}  {way:30}  {measured[-1].rate:9,.0f} rows/s")
    return measured


def report_turns(
    console: Console,
    name: str,
    measured: Sequence[Measured],
    ways: Sequence[str],
    *,
    titles: Titles,
    options: dict[str, int],
) -> None:
    """Print each way's rate and its share of that of the first in the same round; write JSON and a plot."""
    reference = {one.round: one.rate for one in measured if one.way == ways[0]}
    lines, bars, summary = [], {}, {}
    for way in ways:
        rounds = [one for one in measured if one.way == way]
        rate = report.spread([one.rate for one in rounds])
        ratio = report.spread([one.rate / reference[one.round] for one in rounds])
        lines.append([way, rate.shown(), rate.range_shown(), ratio.shown(2), ratio.range_shown(2)])
        bars[way] = rate
        summary[way] = {"rate": asdict(rate), "ratio": asdict(ratio)}
    title = f"{titles.table}: median of {options['rounds']} rounds"
    columns = ["", "rows/s", "lowest-highest", f"of {titles.reference}", "lowest-highest"]
    report.print_table(console, title, columns, lines)
    figures = {"options": options, "summary": summary, "rounds": [asdict(one) for one in measured]}
    plot = report.plot_bars(name, titles.plot, titles.unit, bars)
    report.print_files(console, report.write_json(name, figures), plot)
