"""Compare what was sent with what consumers have applied.

outbox.message ──rows────> │ by message_id │ ──without a partner──> looked up once more ──> figures ──> report, command
processed_message ──────── │ (compare.py)  │

The databases sort; here both sides are read in pieces, so that the memory needed depends on neither.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from relay.consume.failed.queues import dead_queue_name
from relay.errors import NotFoundError
from relay.operate.reconcile.compare import IDS_KEPT, Comparison, LookUpDead
from relay.operate.reconcile.inbox import AppliedMessage, InboxReader
from relay.operate.reconcile.interval import Interval
from relay.operate.reconcile.report import Mend, ReconcileReport, RepeatedKey
from relay.operate.reconcile.table import TableRow, find_ids, list_rows
from relay.operate.sent.selection import SentSelection, first_day
from relay.servers.postgres.tables import Tables

# What is done, how many rows are read, and how many there are; None while the database lists them.
Show = Callable[[str, int, int | None], None]

SHOW_EVERY = 5000  # rows
NEVER = datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What must be compared; `selection` is what the consumers are expected to apply."""

    interval: Interval
    selection: SentSelection
    consumers: list[str] | None = None  # None: all that the inbox knows
    with_repeated_keys: bool = False
    limit: int = 20  # of each kind, how many are named
    flags: tuple[str, ...] = ()  # for the command that mends it


def reconcile(
    tables: Tables,
    inbox: InboxReader,
    question: Question,
    *,
    look_up_dead: LookUpDead = lambda _: frozenset(),
    show: Show = lambda *_: None,
) -> ReconcileReport:
    """Compare; nothing is changed.

    Args:
        look_up_dead: is asked for the queue of a consumer that lacks something.
    Raises:
        NotFoundError: no consumer is named, and the inbox knows no consumer.
    """
    interval = question.interval
    consumers = question.consumers or inbox.consumers()
    if not consumers:
        raise NotFoundError("the inbox is empty, so nobody is known to expect anything: name who does by --consumer")
    kept_from = first_day(tables)
    # The inbox first: a row is there before its message is applied, so what is listed here has a row in the later list.
    show("listing what was applied", 0, None)
    with inbox.list_entries(interval, consumers) as entries:
        show("listing what was sent", 0, None)
        comparison = Comparison(
            inbox.handled(consumers),
            (max(interval.since, _judged_from(kept_from, interval.grace)), interval.until),
            limit=question.limit,
            look_up_applied=inbox.applied,
            look_up_dead=look_up_dead,
            look_up_lost=partial(_still_lost, tables, interval.grace),
        )
        with list_rows(tables, interval, question.selection) as (number, rows):
            comparison.run(_shown(rows, number, show), entries)
    repeated: tuple[int, list[RepeatedKey]] | None = None
    if question.with_repeated_keys:
        show("counting business keys", 0, None)
        repeated = inbox.repeated_keys(interval, consumers, question.limit)
    return _report(question, kept_from, comparison, repeated)


def _still_lost(tables: Tables, grace: timedelta, candidates: Sequence[AppliedMessage]) -> list[AppliedMessage]:
    found = find_ids(tables, list({entry.message_id for entry in candidates}))
    judged_from = _judged_from(first_day(tables), grace)  # a day may have been dropped since
    return [e for e in candidates if e.message_id not in found and e.processed_at >= judged_from]


def _judged_from(kept_from: datetime | None, grace: timedelta) -> datetime:
    """Return from when on an applied message must have a row. An earlier row may be of a day that was dropped."""
    return NEVER if kept_from is None else kept_from + grace


def _shown(rows: Iterator[TableRow], total: int, show: Show) -> Iterator[TableRow]:
    for number, row in enumerate(rows):
        if number % SHOW_EVERY == 0:
            show("comparing", number, total)
        yield row


def _report(
    question: Question,
    kept_from: datetime | None,
    comparison: Comparison,
    repeated: tuple[int, list[RepeatedKey]] | None,
) -> ReconcileReport:
    interval = question.interval
    report = ReconcileReport(
        since=interval.since,
        until=interval.until,
        expected_until=interval.expected_until,
        kept_from=kept_from,
        rows=comparison.rows(),
        consumers=comparison.consumers(),
        duplicates=comparison.duplicates,
        duplicates_first=comparison.duplicates_first,
        repeated_keys=repeated[0] if repeated else None,
        repeated_keys_first=repeated[1] if repeated else [],
        differences=[],
        mend=_mend(question, comparison),
    )
    report.differences.extend(_differences(report))
    return report


def _mend(question: Question, comparison: Comparison) -> Mend | None:
    """Return the `relay replay` that sends what is missing: by id when that is few, else all of its time."""
    first, last = comparison.first_sent, comparison.last_sent
    if first is None or last is None:
        return None
    is_exact = len(comparison.missing_ids) <= IDS_KEPT
    words = ["relay", "replay", *question.flags]
    words += ["--since", first.isoformat(), "--until", (last + timedelta(microseconds=1)).isoformat()]
    if is_exact:
        words += comparison.missing_ids
    else:
        selection, event_types = question.selection, comparison.missing_types
        words += [str(message_id) for message_id in selection.message_ids or ()]
        filters = {
            "--aggregate-type": selection.aggregate_type,
            "--aggregate-id": selection.aggregate_id,
            "--event-type": selection.event_type or (next(iter(event_types)) if len(event_types) == 1 else None),
        }
        words += [f"{flag}={value}" for flag, value in filters.items() if value is not None]
    return Mend(shlex.join(words), is_exact)


def _differences(report: ReconcileReport) -> Iterable[str]:
    for each in report.consumers:
        if each.missing:
            yield f"{each.missing} of {each.expected} that were sent are not in the inbox of {each.consumer}"
        if each.dead:
            queues = ", ".join(dead_queue_name(queue) for queue in each.queues)
            yield f"{each.dead} of {each.expected} that were sent are dead letters of {each.consumer}, in {queues}"
        if each.lost:
            yield (
                f"{each.lost} in the inbox of {each.consumer} without a row in the table, applied from {each.lost_from}"
                f" to {each.lost_until}. A restore of an earlier state, or a failover to a standby that lagged, may"
                " have taken the rows away"
            )
    if parked := report.rows_of("parked"):
        yield f"{parked} parked: see `relay parked list`"
    if held := report.rows_of("held"):
        yield f"{held} held behind parked rows: `relay parked retry` or `discard` lets them go"
    if quarantined := report.rows_of("quarantined"):
        yield f"{quarantined} in quarantine, for a route that does not work: see `relay quarantine list`"
    if report.duplicates:
        yield f"message ids on several rows: {report.duplicates}; an inbox lets one row of each through"
    if report.repeated_keys:
        yield f"business keys applied by several messages: {report.repeated_keys}"
