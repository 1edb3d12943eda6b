"""Print results on a terminal; rich costs a tenth of the start of a command, so `printing` loads this when it draws."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relay.cli.printing import Row, printable


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
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(value)) for value in row))
    return drawn
