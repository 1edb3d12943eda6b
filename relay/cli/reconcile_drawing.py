"""A reconciliation's report, as tables on a terminal or as lines in a pipe; and how far it is."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from relay.cli.printing import Row, print_lines, print_table, say
from relay.operate.reconcile.report import Report
from relay.operate.reconcile.run import Show

STATES = ("sent", "pending", "quarantined", "parked", "held", "discarded")


class Part(NamedTuple):
    """A table of the report; its name begins each of its lines in a pipe."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[Row]


def print_report(report: Report) -> None:
    """Print it on stdout."""
    parts = _parts(report)
    if not sys.stdout.isatty():
        moments = ("since", "until", "expected_until")
        print_lines([(name, _moment(getattr(report, name))) for name in moments])
        print_lines([(part.name, *row) for part in parts for row in part.rows])
        print_lines([("mend", report.mend.command)] if report.mend else [])
        return
    for part in parts:
        if part.rows:
            say(part.title)
            print_table(part.columns, part.rows)
    if report.mend is not None:
        what = "what is missing" if report.mend.is_exact else "all of that time; what was applied has no effect again"
        say(f"To send {what}:\n\n{report.mend.command}\n")
    if not report.differences:
        say(f"no difference in what was sent from {_moment(report.since)} to {_moment(report.expected_until)}")


@contextmanager
def shown_progress() -> Iterator[Show]:
    """Give what takes note of the progress: a bar where stderr is a terminal, else nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _parts(report: Report) -> list[Part]:
    counts = {(count.day, count.state): count.rows for count in report.rows}
    days = sorted({day for day, _ in counts})
    first = "the first of each consumer"
    return [
        Part(
            "rows",
            "Rows by day (UTC)",
            ("day", *STATES),
            [(day, *(counts.get((day, state), 0) for state in STATES)) for day in days],
        ),
        Part(
            "consumer",
            "Messages by consumer",
            ("consumer", "expected", "applied", "missing", "lost"),
            [(each.consumer, each.expected, each.applied, each.missing, each.lost) for each in report.consumers],
        ),
        Part(
            "missing",
            f"Sent, not applied: {first}",
            ("consumer", "message id", "id", "sent at"),
            [
                (each.consumer, row.message_id, row.id, _moment(row.sent_at))
                for each in report.consumers
                for row in each.missing_first
            ],
        ),
        Part(
            "lost",
            f"Applied, without a row in the table: {first}",
            ("consumer", "message id", "processed at"),
            [
                (each.consumer, row.message_id, _moment(row.processed_at))
                for each in report.consumers
                for row in each.lost_first
            ],
        ),
        Part(
            "duplicate",
            "Message ids of several rows: the first",
            ("message id", "rows"),
            [(each.message_id, each.rows) for each in report.duplicates_first],
        ),
        Part(
            "repeated_key",
            "Business keys applied by several messages: the first",
            ("consumer", "business key", "messages"),
            [(each.consumer, each.business_key, each.messages) for each in report.repeated_keys_first],
        ),
    ]


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
