"""`relay dead-letters`."""

import asyncio
import base64
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import orjson
from cyclopts import App, Parameter, validators
from pydantic import TypeAdapter

from relay.cli.consent import EXCERPT, Audit, Consent, Loss
from relay.cli.exit_code import ExitCode
from relay.cli.job_runs import Careful, report_letters, shown_letters, warn_of_returns
from relay.cli.operations import RemoteBrokerOptions, RemoteOptions
from relay.cli.options import BrokerOptions, DryRun, FailureGroup, MessageFilters, Output, check_choice
from relay.cli.printing import aside, counted, print_json, print_pairs, print_table, say
from relay.jobs.job import NO_CAUTION, Caution
from relay.observe.log import keep_libraries_quiet
from relay.observe.printable import printable, utc
from relay.operate.letters.audit import Entry
from relay.operate.letters.document import json_of
from relay.operate.letters.export import export, written_whole
from relay.operate.letters.letter import Letter, Selection
from relay.operate.letters.work import queues_of
from relay.operate.sent.moment import parse_interval
from relay.operations.operations import Operations

MOST_LISTED = 100  # unless --limit says otherwise
PREVIEW = 1000  # bytes of a body that is not JSON
LIST_COLUMNS = (
    "position",
    "message id",
    "type",
    "key",
    "reason",
    "exception",
    "attempts",
    "first failure",
    "last failure",
    "consumer",
)

app = App(name="dead-letters", help="See, send back, throw away or save what consumers gave up.")

QueueName = Annotated[str, Parameter(help="The consumed queue, or that of its dead letters.")]
MessageId = Annotated[str, Parameter(name="MESSAGE-ID", help="Its message id.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Filters(MessageFilters):
    """Which letters."""

    reason: Annotated[str | None, Parameter(help="permanent, exhausted, poisoned, unhandled, invalid, ...")] = None
    exception: Annotated[str | None, Parameter(help="A part of the exception.")] = None
    consumer: Annotated[str | None, Parameter(help="That this consumer gave up.")] = None
    group: FailureGroup = None
    since: Annotated[str | None, Parameter(help="Failed at or after 2026-11-21T08:00:00Z, or 2h ago: `2h`.")] = None
    until: Annotated[str | None, Parameter(help="Failed before.")] = None
    limit: Annotated[int | None, Parameter(help="The first so many.", validator=validators.Number(gte=1))] = None

    def selection(self, *message_ids: str) -> Selection:
        """Return the letters with these ids, or all, that the filters select."""
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
            group=self.group,
            limit=self.limit,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BulkFilters(Filters):
    """Which letters, for a command that changes them."""

    all_: Annotated[bool, Parameter(name="--all", help="Every letter; needed when there is no filter.")] = False

    def bulk_selection(self, *message_ids: str) -> Selection:
        """Return the letters to change.

        Raises:
            UsageError: no letter was chosen, and --all was not given; or both were.
        """
        selection = self.selection(*message_ids)
        choices = "message ids, a filter such as --group or --event-type, or --all for every letter"
        check_choice(is_filtered=not selection.is_everything, is_all=self.all_, choices=choices)
        return selection


@app.command(name="list")
def list_(
    queue: QueueName,
    /,
    *message_ids: MessageId,
    options: RemoteBrokerOptions = RemoteBrokerOptions(),
    filters: Filters = Filters(),
    output: Output = "text",
) -> ExitCode:
    """List dead letters, the first 100 unless --limit says otherwise; they stay where they are."""
    _, dead = queues_of(queue)
    selection = filters.selection(*message_ids)
    if selection.limit is None:
        selection = replace(selection, limit=MOST_LISTED)
    keep_libraries_quiet()
    found = options.operations().list_letters(dead, selection)
    letters, read = found.letters, found.read
    if output == "json":
        print_json({"queue": dead, "messages": read.letters, "letters": letters})
    else:
        # On a terminal the exception needs the room; `show` prints the rest.
        print_table(LIST_COLUMNS, [_row(letter) for letter in letters], wide={"first failure", "consumer"})
    if read.matched == selection.limit and read.letters > read.matched:
        aside(f"the first {read.matched} that match, of a queue with {read.letters}: --limit lists more")
    warn_of_returns(read.warning)
    return ExitCode.DONE


@app.command
def show(
    queue: QueueName,
    message_id: MessageId,
    /,
    *,
    options: RemoteBrokerOptions = RemoteBrokerOptions(),
    output: Output = "text",
) -> ExitCode:
    """Show one dead letter with its headers and its body."""
    _, dead = queues_of(queue)
    keep_libraries_quiet()
    told = options.operations().show_letter(dead, message_id)
    if output == "json":
        print_json(told)
        return ExitCode.DONE
    _print_letter(told)
    _print_body(_body(told))
    return ExitCode.DONE


@app.command(name="retry")
def retry_(
    queue: QueueName,
    /,
    *message_ids: MessageId,
    audit: Audit = Audit(),
    options: RemoteOptions = RemoteOptions(),
    filters: BulkFilters = BulkFilters(),
    careful: Careful = Careful(),
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Send letters back into the queue that they came from, where they are tried again with all attempts."""
    consumed, dead = queues_of(queue)
    selection, caution = filters.bulk_selection(*message_ids), careful.caution()
    if not dry_run:
        audit.check_reason()
    entry = Entry("retry", dead, consumed, audit.operator, audit.reason)
    keep_libraries_quiet()
    if dry_run:
        return _preview(options.operations(), entry, selection, output)
    return _change(options, entry, selection, caution=caution, output=output)


@app.command(name="discard")
def discard_(
    queue: QueueName,
    /,
    *message_ids: MessageId,
    consent: Consent = Consent(),
    options: RemoteOptions = RemoteOptions(),
    filters: BulkFilters = BulkFilters(),
    output: Output = "text",
) -> ExitCode:
    """Throw letters away for good: `relay dead-letters export` saves them first."""
    _, dead = queues_of(queue)
    selection = filters.bulk_selection(*message_ids)
    consent.check()
    keep_libraries_quiet()
    operations = options.operations()
    entry = Entry("discard", dead, None, consent.operator, consent.reason)
    if consent.dry_run:
        return _preview(operations, entry, selection, output)
    if not consent.is_given(lambda: _loss(operations, entry, selection)):
        return ExitCode.FAILED
    return _change(options, entry, selection, caution=NO_CAUTION, output=output)


@app.command(name="export")
def export_(
    queue: QueueName,
    file: Annotated[Path, Parameter(help="To write, one letter a line; - is stdout.", allow_leading_hyphen=True)],
    /,
    *message_ids: MessageId,
    options: BrokerOptions = BrokerOptions(),
    filters: Filters = Filters(),
    overwrite: Annotated[bool, Parameter(help="Also when the file exists.")] = False,
) -> ExitCode:
    """Save letters as JSON Lines; they stay where they are."""
    _, dead = queues_of(queue)
    selection = filters.selection(*message_ids)
    keep_libraries_quiet()
    broker = options.load().settings.broker
    if str(file) == "-":
        read = asyncio.run(export(broker, dead, selection, sys.stdout.buffer))
        sys.stdout.flush()
        warn_of_returns(read.warning)
        return ExitCode.DONE
    with written_whole(file, overwrite=overwrite) as opened:
        read = asyncio.run(export(broker, dead, selection, opened))
    say(f"saved {counted(read.matched, 'letter')} of {dead} in {file}")
    warn_of_returns(read.warning)
    return ExitCode.DONE


def _loss(operations: Operations, entry: Entry, selection: Selection) -> Loss:
    seen = operations.look_at_letters(entry.queue, selection, first=EXCERPT)
    warn_of_returns(seen.read.warning)
    excerpt = [(each.message_id, each.type, each.key, each.reason) for each in seen.first]
    return Loss(f"throw away {counted(seen.read.matched, 'letter')} of {entry.queue} for good", seen.oldest, excerpt)


def _preview(operations: Operations, entry: Entry, selection: Selection, output: Output) -> ExitCode:
    return report_letters(operations.preview_letters(entry, selection), entry, output, is_preview=True)


def _change(
    options: RemoteOptions, entry: Entry, selection: Selection, *, caution: Caution, output: Output
) -> ExitCode:
    with shown_letters(options.log_settings(), entry) as show:
        done = options.operations().change_letters(entry, selection, caution=caution, show=show)
    return report_letters(done, entry, output)


def _print_letter(told: dict[str, Any]) -> None:
    """Print the letter's facts, its properties and its headers."""
    letter = TypeAdapter(Letter).validate_python({name: told[name] for name in Letter.__dataclass_fields__})
    facts = [(name.replace("_", " "), getattr(letter, name)) for name in Letter.__dataclass_fields__]
    for kind, named in (("property", told["properties"]), ("header", told["headers"])):
        facts += [(f"{kind} {name}", value) for name, value in named.items()]
    print_pairs(facts)


def _body(told: dict[str, Any]) -> bytes:
    """Return the body, byte for byte where the document has it so."""
    if "body_base64" in told:
        return base64.b64decode(told["body_base64"])
    return orjson.dumps(told["body"])


def _print_body(body: bytes) -> None:
    """Print JSON indented, and only the beginning of anything else."""
    value = json_of(body)
    if value is None:
        say(f"body of {len(body)} bytes, not JSON: {printable(body[:PREVIEW].decode(errors='backslashreplace'))}")
        return
    for line in orjson.dumps(value, option=orjson.OPT_INDENT_2).decode().splitlines():
        say(printable(line))


def _row(letter: Letter) -> tuple[object, ...]:
    return (
        letter.position,
        letter.message_id,
        letter.type,
        letter.key,
        letter.reason,
        letter.exception,
        letter.attempts,
        letter.first_failed_at and utc(letter.first_failed_at),
        letter.last_failed_at and utc(letter.last_failed_at),
        letter.consumer,
    )
