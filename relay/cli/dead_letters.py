"""`relay dead-letters`."""

import asyncio
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from relay.cli.consent import EXCERPT, Consent, Loss, check_reason
from relay.cli.dead_letters_printing import print_body, print_letter, print_letters
from relay.cli.options import (
    AggregateId,
    AggregateType,
    BrokerOptions,
    By,
    DryRun,
    EventType,
    Options,
    Output,
    Why,
)
from relay.cli.printing import Row, aside, complain, print_json, say
from relay.cli.progress import Seen, shown_progress
from relay.config.settings import Settings
from relay.errors import UsageError
from relay.logger import get_logger
from relay.observe.log import keep_libraries_quiet
from relay.operate.dead_letters.audit import Entry, write_audit
from relay.operate.dead_letters.change import Change, Done, queues_of
from relay.operate.dead_letters.document import document
from relay.operate.dead_letters.export import export, written_whole
from relay.operate.dead_letters.letter import Held, Selection
from relay.operate.dead_letters.read import Read, list_command, list_letters, read_letters, show_letter
from relay.operate.session import session
from relay.replay.job import operator
from relay.replay.moment import parse_interval

INTERRUPTED = 130
MOST_LISTED = 100  # unless --limit says otherwise

app = App(name="dead-letters", help="See, send back, throw away or save what consumers gave up.")
log = get_logger(__name__)

QueueName = Annotated[str, Parameter(help="The consumed queue, or that of its dead letters.")]
MessageId = Annotated[str, Parameter(name="MESSAGE-ID", help="Its message id.")]
All = Annotated[bool, Parameter(name="--all", help="Every letter; needed when there is no filter.")]
Rate = Annotated[
    float | None, Parameter(help="Letters a second, at most.", validator=validators.Number(gt=0, lt=1_000_000))
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which letters."""

    aggregate_type: AggregateType = None
    aggregate_id: AggregateId = None
    event_type: EventType = None
    reason: Annotated[str | None, Parameter(help="permanent, exhausted, poisoned, unhandled, invalid, ...")] = None
    exception: Annotated[str | None, Parameter(help="A part of the exception.")] = None
    consumer: Annotated[str | None, Parameter(help="That this consumer gave up.")] = None
    since: Annotated[str | None, Parameter(help="Failed at or after 2026-11-21T08:00:00Z, or 2h ago: `2h`.")] = None
    until: Annotated[str | None, Parameter(help="Failed before.")] = None
    limit: Annotated[int | None, Parameter(help="The first so many.", validator=validators.Number(gte=1))] = None

    def selection(self, *message_ids: str) -> Selection:
        since, until = parse_interval(self.since, self.until, datetime.now(UTC))
        return Selection(
            message_ids=frozenset(message_ids),
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            type=self.event_type,
            reason=self.reason,
            exception=self.exception,
            consumer=self.consumer,
            since=since,
            until=until,
            limit=self.limit,
        )


@app.command(name="list")
def list_(
    queue: QueueName,
    /,
    *message_ids: MessageId,
    options: BrokerOptions | None = None,
    filters: Filters | None = None,
    output: Output = "text",
) -> int:
    """List dead letters, the first 100 unless --limit says otherwise; they stay where they are."""
    _, dead = queues_of(queue)
    selection = (filters or Filters()).selection(*message_ids)
    if selection.limit is None:
        selection = replace(selection, limit=MOST_LISTED)
    letters, read = asyncio.run(list_letters(_load(options or BrokerOptions()).broker, dead, selection))
    if output == "json":
        print_json({"queue": dead, "messages": read.letters, "letters": letters})
    else:
        print_letters(letters)
    if read.matched == selection.limit and read.letters > read.matched:
        aside(f"the first {read.matched} that match, of a queue with {read.letters}: --limit lists more")
    _warn(read)
    return 0


@app.command
def show(
    queue: QueueName, message_id: MessageId, /, *, options: BrokerOptions | None = None, output: Output = "text"
) -> int:
    """Show one dead letter with its headers and its body."""
    _, dead = queues_of(queue)
    held = asyncio.run(show_letter(_load(options or BrokerOptions()).broker, dead, message_id))
    told = document(held)
    if output == "json":
        print_json(told)
        return 0
    print_letter(held.letter, told)
    print_body(held.delivered.body)
    return 0


@app.command(name="retry")
def retry_(
    queue: QueueName,
    /,
    *message_ids: MessageId,
    why: Why = "",
    by: By = None,
    options: Options | None = None,
    filters: Filters | None = None,
    all_: All = False,
    rate: Rate = None,
    dry_run: DryRun = False,
    output: Output = "text",
) -> int:
    """Send letters back into the queue that they came from, where they are tried anew with all attempts."""
    consumed, dead = queues_of(queue)
    selection = _bulk(filters, message_ids, everything=all_)
    if not dry_run:
        check_reason(why)
    entry = Entry("retry", dead, consumed, operator(by), why.strip())
    return _change(_load(options or Options()), entry, selection, rate, output, dry_run=dry_run)


@app.command(name="discard")
def discard_(
    queue: QueueName,
    /,
    *message_ids: MessageId,
    consent: Consent | None = None,
    options: Options | None = None,
    filters: Filters | None = None,
    all_: All = False,
    output: Output = "text",
) -> int:
    """Throw letters away for good: `relay dead-letters export` saves them first."""
    _, dead = queues_of(queue)
    selection = _bulk(filters, message_ids, everything=all_)
    consent = consent or Consent()
    consent.check()
    settings = _load(options or Options())
    entry = Entry("discard", dead, None, consent.operator, consent.reason)
    if not consent.dry_run and not consent.is_given(lambda: _loss(settings, dead, selection)):
        return 1
    return _change(settings, entry, selection, None, output, dry_run=consent.dry_run)


@app.command(name="export")
def export_(
    queue: QueueName,
    file: Annotated[Path, Parameter(help="To write, one letter a line; - is stdout.", allow_leading_hyphen=True)],
    /,
    *message_ids: MessageId,
    options: BrokerOptions | None = None,
    filters: Filters | None = None,
    overwrite: Annotated[bool, Parameter(help="Also when the file exists.")] = False,
) -> int:
    """Save letters as JSON Lines; they stay where they are."""
    _, dead = queues_of(queue)
    selection = (filters or Filters()).selection(*message_ids)
    broker = _load(options or BrokerOptions()).broker
    if str(file) == "-":
        read = asyncio.run(export(broker, dead, selection, sys.stdout.buffer))
        sys.stdout.flush()
        _warn(read)
        return 0
    with written_whole(file, overwrite=overwrite) as opened:
        read = asyncio.run(export(broker, dead, selection, opened))
    say(f"saved {_count(read.matched)} of {dead} in {file}")
    _warn(read)
    return 0


def _load(options: BrokerOptions | Options) -> Settings:
    keep_libraries_quiet()
    return options.load().settings


def _bulk(filters: Filters | None, message_ids: tuple[str, ...], *, everything: bool) -> Selection:
    selection = (filters or Filters()).selection(*message_ids)
    if selection.is_everything and not everything:
        raise UsageError("give message ids, a filter such as --reason or --event-type, or --all for every letter")
    if everything and not selection.is_everything:
        raise UsageError("--all and a filter exclude each other")
    return selection


def _loss(settings: Settings, queue: str, selection: Selection) -> Loss:
    excerpt: list[Row] = []
    oldest: datetime | None = None

    def note(held: Held) -> None:
        nonlocal oldest
        letter = held.letter
        if len(excerpt) < EXCERPT:
            excerpt.append((letter.message_id, letter.type, letter.key, letter.reason))
        if letter.last_failed_at is not None:
            oldest = min(oldest or letter.last_failed_at, letter.last_failed_at)

    read = asyncio.run(read_letters(settings.broker, queue, selection, note))
    _warn(read)
    return Loss(f"throw away {_count(read.matched)} of {queue} for good", oldest, excerpt)


def _change(
    settings: Settings, entry: Entry, selection: Selection, rate: float | None, output: Output, *, dry_run: bool
) -> int:
    if dry_run:
        done = asyncio.run(Change(settings.broker, entry, selection, write=None).run())
        return _report(entry, done, output, dry_run=True)
    database = settings.database
    with (
        session(database) as connection,
        shown_progress(settings.log, f"{entry.command} {entry.queue}", partial(_tell, entry)) as show,
    ):
        write = partial(write_audit, connection, database.schema_name, entry)
        change = Change(settings.broker, entry, selection, write=write, rate=rate, show=lambda *seen: show(Seen(*seen)))
        done = asyncio.run(change.run_until_told())
    return _report(entry, done, output, dry_run=False)


def _tell(entry: Entry, seen: Seen) -> None:
    log.info(
        "dead_letters.progressed",
        command=entry.command,
        queue=entry.queue,
        letters=seen.total,
        read=seen.done,
        refused=seen.failed,
    )


def _report(entry: Entry, done: Done, output: Output, *, dry_run: bool) -> int:
    """Print what was done; 3 when some of what was meant was not, 1 when nothing was."""
    target = f" into {entry.sent_to}" if entry.sent_to else ""
    if output == "json":
        print_json(done)
    elif dry_run:
        say(f"would {entry.command} {_count(done.done)} of {done.queue}{target}")
    else:
        past = {"retry": "sent", "discard": "threw away"}[entry.command]
        say(f"{past} {_count(done.done)} of {done.queue}{target}")
    for message_id, reason in done.refused:
        complain(f"{message_id or 'a letter without a message id'} stays: {reason}")
    for message_id in done.not_found:
        complain(f"{message_id} is not there, or is with another consumer: see {list_command(done.queue)}")
    _warn(done)
    if done.refused or done.not_found:
        return 3 if done.done else 1
    if done.is_stopped:
        aside("stopped: the same command goes on")
        return INTERRUPTED
    return 0


def _warn(read: Read | Done) -> None:
    if read.warning:
        complain(
            "letters have come back so often that a delivery limit of their queue may drop them, and could not be"
            f" put in anew: {read.warning}; docs/dead-letters.md tells what to do"
        )


def _count(letters: int) -> str:
    return f"{letters} letter" if letters == 1 else f"{letters} letters"
