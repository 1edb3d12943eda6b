"""Print results: tables on a terminal, tab-separated lines in a pipe, JSON when asked.

Every text is printed escaped: a row, a header or a broker's word cannot move the cursor of a terminal.
rich is imported where a table is drawn: it takes a tenth of the start of a command.
"""

import base64
import logging
import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from traceback import format_exception
from types import TracebackType
from typing import TYPE_CHECKING

import orjson

from relay.observe.printable import printable, printable_json, printable_lines
from relay.runtime.scrub import scrub

if TYPE_CHECKING:
    from rich.table import Table

Row = Sequence[object]


def print_json(value: object) -> None:
    """Print one JSON document; indented on a terminal, on one line in a pipe."""
    option = orjson.OPT_APPEND_NEWLINE | (orjson.OPT_INDENT_2 if sys.stdout.isatty() else 0)
    sys.stdout.write(printable_json(orjson.dumps(value, option=option, default=_as_json).decode()))
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Row], *, wide: Collection[str] = ()) -> None:
    """Print rows below a line of column names; on a terminal without the columns that are too `wide` for it."""
    if not sys.stdout.isatty():
        print_lines([columns, *rows])
        return
    from rich.console import Console  # noqa: PLC0415

    kept = [index for index, column in enumerate(columns) if column not in wide]
    Console().print(table([columns[index] for index in kept], [[row[index] for index in kept] for row in rows]))


def table(columns: Sequence[str], rows: Iterable[Row]) -> "Table":
    """Return a table for a terminal."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold", no_wrap=column == "message id")  # an operator may copy it
    for row in rows:
        drawn.add_row(*(Text(printable(value)) for value in row))
    return drawn


def print_pairs(pairs: Sequence[tuple[str, object]]) -> None:
    """Print names and values; on a terminal aligned, and without those that are not set."""
    if not sys.stdout.isatty():
        print_lines(pairs)
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    drawn = Table.grid(padding=(0, 2))
    drawn.add_column(style="bold")
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None:
            drawn.add_row(Text(name), Text(printable(value)))
    Console().print(drawn)


def print_lines(rows: Iterable[Row]) -> None:
    """Print rows with tabs between the values, for `cut` and `awk`."""
    for row in rows:
        sys.stdout.write("\t".join(printable(value) for value in row) + "\n")
    sys.stdout.flush()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def say(line: str) -> None:
    """Print one line about what was done."""
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def aside(line: str) -> None:
    """Print one line on stderr, out of the way of a pipe."""
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def complain(line: str) -> None:
    """Print one line about what is wrong on stderr, without a password."""
    sys.stderr.write(f"relay: {printable(' '.join(scrub(line).split()))}\n")
    sys.stderr.flush()


def guard_stderr() -> None:
    """Let no traceback show a password, or move a terminal's cursor, where no log is set up.

    That is a traceback of the main thread, of another thread, or of a task that asyncio logs.
    """
    sys.excepthook = write_traceback
    threading.excepthook = lambda end: write_traceback(end.exc_type, end.exc_value, end.exc_traceback)
    if logging.lastResort is not None:  # for what asyncio logs of a task that failed
        logging.lastResort.setFormatter(_WithoutPasswords())


def write_traceback(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Print a traceback on stderr."""
    sys.stderr.write(printable_lines(scrub("".join(format_exception(kind, error, trace)))))


class _WithoutPasswords(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(scrub(super().format(record)))


def _as_json(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no JSON form")
