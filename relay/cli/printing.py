"""Print results: tables on a terminal, tab-separated lines in a pipe, JSON when asked.

Whatever goes out here is printable: what strangers wrote cannot move the cursor of a terminal.
"""

import base64
import logging
import sys
import threading
from collections.abc import Iterable, Sequence
from traceback import format_exception
from types import TracebackType

import orjson

from relay.observe.printable import printable, printable_json, printable_lines
from relay.scrub import scrub

Row = Sequence[object]


def print_json(value: object) -> None:
    """Print one JSON document; indented on a terminal, on one line in a pipe."""
    option = orjson.OPT_APPEND_NEWLINE | (orjson.OPT_INDENT_2 if sys.stdout.isatty() else 0)
    sys.stdout.write(printable_json(orjson.dumps(value, option=option, default=_as_json).decode()))
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Print rows below a line of column names."""
    if not sys.stdout.isatty():
        print_lines([columns, *rows])
        return
    from relay.cli.drawing import draw_table  # noqa: PLC0415

    draw_table(columns, rows)


def print_pairs(pairs: Sequence[tuple[str, object]]) -> None:
    """Print names and values; on a terminal without those that are not set."""
    if not sys.stdout.isatty():
        print_lines(pairs)
        return
    from relay.cli.drawing import draw_pairs  # noqa: PLC0415

    draw_pairs(pairs)


def print_lines(rows: Iterable[Row]) -> None:
    """Print rows with tabs between the values, for `cut` and `awk`."""
    for row in rows:
        sys.stdout.write("\t".join(printable(value) for value in row) + "\n")
    sys.stdout.flush()


def say(line: str) -> None:
    """Print one line about what was done."""
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def aside(line: str) -> None:
    """Print one line beside the result, out of the way of a pipe."""
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
