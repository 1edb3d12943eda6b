"""`relay reconcile`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from cyclopts import Parameter, validators
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from relay.cli.exit_code import ExitCode
from relay.cli.options import DatabaseOptions, Flags, InboxOptions, Length, MessageIds, Output
from relay.cli.printing import Row, aside, complain, print_json, print_lines, print_table, say
from relay.observe.printable import utc
from relay.operate.asked import MessageFilter
from relay.operate.operation import SCAN_TIMEOUT
from relay.operate.reconcile.ask import ReconcileRequest, ask
from relay.operate.reconcile.inbox import FLAG, OWN
from relay.operate.reconcile.report import ReconcileReport
from relay.operate.reconcile.run import Show
from relay.runtime.scrub import redacted

STATES = ("sent", "pending", "quarantined", "parked", "held", "archived", "discarded")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """When the rows that are compared were sent."""

    since: Annotated[str, Parameter(help="Sent at or after 2026-11-21T08:00:00Z, or 2h ago: `2h`.")]
    until: Annotated[str | None, Parameter(help="Sent before; else until now.")] = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions(InboxOptions):
    """Which consumers should have applied those rows, and how soon."""

    consumer: Annotated[
        list[str] | None, Parameter(help="Name of a consumer; may be repeated. Else all that the inbox knows.")
    ] = None
    grace: Annotated[Length, Parameter(help="What was sent within this need not have been applied yet.")] = "60s"


def reconcile(
    *message_ids: MessageIds,
    period: Period,
    consumers: ConsumerOptions = ConsumerOptions(),
    filters: Annotated[MessageFilter, Flags] = MessageFilter(),
    unique_business_key: Annotated[
        bool, Parameter(help="A business key that a consumer has applied twice is a difference, too.")
    ] = False,
    limit: Annotated[
        int, Parameter(help="Of each kind, name at most so many.", validator=validators.Number(gte=1))
    ] = 20,
    options: DatabaseOptions = DatabaseOptions(),
    output: Output = "text",
) -> ExitCode:
    """Compare what was sent with what consumers have applied; exit with 1 on a difference, and tell what mends it."""
    settings = options.load().settings
    database = settings.database
    of_inbox = consumers.settings(database)
    asked = ReconcileRequest(
        since=period.since,
        until=period.until,
        message_ids=message_ids,
        **dict(filters),
        consumers=consumers.consumer or (),
        grace=consumers.grace,
        with_repeated_keys=unique_business_key,
        limit=limit,
        flags=_flags(options),
    )
    with _shown_progress() as show:
        told = ask(
            database,
            of_inbox,
            asked,
            timeout=SCAN_TIMEOUT,
            broker=settings.broker,
            inbox_url=FLAG if consumers.url else OWN,
            show=show,
        )
    for words in told.not_compared:
        aside(words)
    report = told.report
    if report.kept_from is not None and report.since < report.kept_from:
        aside(f"sent rows are kept from {report.kept_from:%Y-%m-%d} (UTC) on; nothing older can be compared")
    if output == "json":
        print_json(report)
    else:
        _print_report(report)
    for difference in report.differences:
        complain(difference)
    return ExitCode.FAILED if report.differences else ExitCode.DONE


def _flags(options: DatabaseOptions) -> tuple[str, ...]:
    """Return the flags with which a command finds the same settings, without a password."""
    given = (
        ("--config", options.config and str(options.config)),
        ("--database-url", options.database_url and redacted(options.database_url)),
    )
    return tuple(word for name, value in given if value for word in (name, value))


class _Part(NamedTuple):
    """A table of the report; its name begins each of its lines in a pipe."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[Row]


def _print_report(report: ReconcileReport) -> None:
    """Print it on stdout."""
    parts = _parts(report)
    if not sys.stdout.isatty():
        moments = ("since", "until", "expected_until")
        print_lines([(name, utc(getattr(report, name))) for name in moments])
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
        say(f"no difference in what was sent from {utc(report.since)} to {utc(report.expected_until)}")


@contextmanager
def _shown_progress() -> Iterator[Show]:
    """Yield the function that shows the progress: in a bar if stderr is a terminal, else nowhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _parts(report: ReconcileReport) -> list[_Part]:
    counts = {(count.day, count.state): count.rows for count in report.rows}
    days = sorted({day for day, _ in counts})
    first = "the first of each consumer"
    return [
        _Part(
            "rows",
            "Rows by day (UTC)",
            ("day", *STATES),
            [(day, *(counts.get((day, state), 0) for state in STATES)) for day in days],
        ),
        _Part(
            "consumer",
            "Messages by consumer",
            ("consumer", "expected", "applied", "missing", "lost", "dead"),
            [
                (each.consumer, each.expected, each.applied, each.missing, each.lost, each.dead)
                for each in report.consumers
            ],
        ),
        _Part(
            "missing",
            f"Sent, not applied: {first}",
            ("consumer", "message id", "id", "sent at"),
            [
                (each.consumer, row.message_id, row.id, utc(row.sent_at))
                for each in report.consumers
                for row in each.missing_first
            ],
        ),
        _Part(
            "lost",
            f"Applied, without a row in the table: {first}",
            ("consumer", "message id", "processed at"),
            [
                (each.consumer, row.message_id, utc(row.processed_at))
                for each in report.consumers
                for row in each.lost_first
            ],
        ),
        _Part(
            "duplicate",
            "Message ids of several rows: the first",
            ("message id", "rows"),
            [(each.message_id, each.rows) for each in report.duplicates_first],
        ),
        _Part(
            "repeated_key",
            "Business keys applied by several messages: the first",
            ("consumer", "business key", "messages"),
            [(each.consumer, each.business_key, each.messages) for each in report.repeated_keys_first],
        ),
    ]
