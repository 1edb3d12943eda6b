"""Print results on a terminal; rich costs a tenth of the start of a command, so `printing` loads this when it draws."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relay.cli.printing import Row
from relay.doctor.finding import Verdict
from relay.observe.printable import printable

MARKS = {
    Verdict.OK: ("ok", "green"),
    Verdict.WARNING: ("warn", "yellow"),
    Verdict.FAILED: ("FAIL", "bold red"),
    Verdict.SKIPPED: ("skip", "dim"),
}


def draw_table(columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Print rows below their columns' names."""
    Console().print(table(columns, rows))


def draw_pairs(pairs: Sequence[tuple[str, object]]) -> None:
    """Print names and values, aligned, without those that are not set."""
    drawn = Table.grid(padding=(0, 2))
    drawn.add_column(style="bold")
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None:
            drawn.add_row(Text(name), Text(printable(value)))
    Console().print(drawn)


def table(columns: Sequence[str], rows: Iterable[Row]) -> Table:
    """Give a table for a terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column == "message id")  # somebody may copy it
    for row in rows:
        drawn.add_row(*(Text(printable(value)) for value in row))
    return drawn


def draw_checklist(title: str, lines: Iterable[tuple[Verdict, str, str, str]]) -> None:
    """Print a title, and below it for each line its mark, its name, what was seen and what to do about it."""
    drawn = Table.grid(padding=(0, 2))
    for fold in (False, False, True):
        drawn.add_column(overflow="fold" if fold else "ellipsis", no_wrap=not fold)
    for verdict, name, words, remedy in lines:
        mark, colour = MARKS[verdict]
        drawn.add_row(Text(f"  {mark}", style=colour), Text(name), Text(printable(words)))
        if remedy:
            drawn.add_row("", "", Text(printable(remedy), style="bold"))
    Console().print(Text(title, style="bold"), drawn)
