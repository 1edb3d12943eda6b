"""`relay dead-letters`."""

import asyncio
import base64
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
from cyclopts import App, Parameter, validators
from pydantic import TypeAdapter

from relay.cli.consent import EXCERPT, Audit, Consent, Loss
from relay.cli.exit_code import ExitCode
from relay.cli.job_runs import (
    Careful,
    report_letters,
    run_letters_job,
    shown_letters,
    warn_of_returns,
)
from relay.cli.operations import RemoteBrokerOptions, RemoteOptions
from relay.cli.options import BrokerOptions, DryRun, Flags, Most, Output, check_choice
from relay.cli.printing import aside, counted, print_json, print_pairs, print_table, say
from relay.jobs.job import NO_CAUTION, Caution, Kind
from relay.observe.log import keep_libraries_quiet
from relay.observe.printable import printable, utc
from relay.operate.asked import MAX_ID, MOST, Many
from relay.operate.letters import asked as letters
from relay.operate.letters.asked import LetterFilter, RetryLetters
from relay.operate.letters.audit import AuditEntry
from relay.operate.letters.document import json_of
from relay.operate.letters.export import export, written_whole
from relay.operate.letters.letter import Letter
from relay.operate.letters.read import look_through, seen_of
from relay.operate.letters.work import done_by_console, preview_letters, queues_of

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
Filters = Annotated[LetterFilter, Flags]


@app.command(name="list")
def list_(
    queue: QueueName,
    /,
    *message_ids: MessageId,
    options: RemoteBrokerOptions = RemoteBrokerOptions(),
    filters: Filters = LetterFilter(),
    limit: Most = 100,
    output: Output = "text",
) -> ExitCode:
    """List dead letters; they stay where they are."""
    asked = _listed(queue, message_ids, filters, limit)
    keep_libraries_quiet()
    found = options.operations().do(letters.look, asked)
    if output == "json":
        print_json({"queue": found.queue, "messages": found.messages, "letters": found.letters})
    else:
        # On a terminal the exception needs the room; `show` prints the rest.
        print_table(LIST_COLUMNS, [_row(letter) for letter in found.letters], wide={"first failure", "consumer"})
    if found.matched == asked.limit and found.messages > found.matched:
        aside(f"the first {found.matched} that match, of a queue with {found.messages}: --limit lists more")
    warn_of_returns(found.warning)
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
    keep_libraries_quiet()
    asked = letters.RevealLetter.model_construct(queue=queue, message_id=message_id)
    told = options.operations().do(letters.reveal, asked)
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
    filters: Filters = LetterFilter(),
    many: Annotated[Many, Flags] = Many(),
    careful: Careful = Careful(),
    dry_run: DryRun = False,
    output: Output = "text",
) -> ExitCode:
    """Send letters back into the queue that they came from, where they are tried again with all attempts."""
    consumed, dead = queues_of(queue)
    asked = _changed(queue, message_ids, filters, many, audit=audit, caution=careful.caution())
    if not dry_run:
        audit.check_reason()
    entry = AuditEntry(Kind.RETRY, dead, consumed, audit.operator, audit.reason)
    keep_libraries_quiet()
    if dry_run:
        return _preview(options, entry, asked, output)
    return _change(options, entry, asked, output=output)


@app.command(name="discard")
def discard_(
    queue: QueueName,
    /,
    *message_ids: MessageId,
    consent: Consent = Consent(),
    options: RemoteOptions = RemoteOptions(),
    filters: Filters = LetterFilter(),
    many: Annotated[Many, Flags] = Many(),
    output: Output = "text",
) -> ExitCode:
    """Throw letters away for good: `relay dead-letters export` saves them first."""
    _, dead = queues_of(queue)
    asked = _changed(queue, message_ids, filters, many, audit=consent, caution=NO_CAUTION)
    consent.check()
    keep_libraries_quiet()
    entry = AuditEntry(Kind.DISCARD, dead, None, consent.operator, consent.reason)
    if consent.dry_run:
        return _preview(options, entry, asked, output)
    if not consent.is_given(lambda: _loss(options, dead, asked)):
        return ExitCode.FAILED
    return _change(options, entry, asked, output=output)


@app.command(name="export")
def export_(
    queue: QueueName,
    file: Annotated[Path, Parameter(help="To write, one letter a line; - is stdout.", allow_leading_hyphen=True)],
    /,
    *message_ids: MessageId,
    options: BrokerOptions = BrokerOptions(),
    filters: Filters = LetterFilter(),
    limit: Annotated[int | None, Parameter(help="At most so many.", validator=validators.Number(gte=1))] = None,
    overwrite: Annotated[bool, Parameter(help="Also when the file exists.")] = False,
) -> ExitCode:
    """Save letters as JSON Lines; they stay where they are."""
    _, dead = queues_of(queue)
    selection = _listed(queue, message_ids, filters, MAX_ID).selection(limit)
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


def _listed(queue: str, message_ids: tuple[str, ...], filters: LetterFilter, limit: int) -> letters.ListLetters:
    return letters.ListLetters.model_construct(queue=queue, message_ids=message_ids, limit=limit, **dict(filters))


def _changed(
    queue: str, message_ids: tuple[str, ...], filters: LetterFilter, many: Many, *, audit: Audit, caution: Caution
) -> RetryLetters:
    """Return which letters to change, and how.

    Raises:
        UsageError: no letter was chosen, and --all was not given; or both were.
    """
    asked = RetryLetters.model_construct(
        queue=queue, message_ids=message_ids, why=audit.reason, **dict(filters), **dict(many), **asdict(caution)
    )
    choices = "message ids, a filter such as --group or --event-type, or --all for every letter"
    check_choice(is_filtered=not asked.selection(None).is_everything, is_all=asked.all, choices=choices)
    return asked


def _looked_for(asked: RetryLetters) -> letters.ListLetters:
    """Return the letters that would change, as many as a console looks at."""
    chosen = {name: getattr(asked, name) for name in letters.ChosenLetters.model_fields}
    return letters.ListLetters.model_construct(**chosen, limit=asked.limit or MOST)


def _loss(options: RemoteOptions, dead: str, asked: RetryLetters) -> Loss:
    if options.server:
        found = options.operations().do(letters.look, _looked_for(asked))
        seen = seen_of(found.letters, matched=found.matched, warning=found.warning, first=EXCERPT)
    else:
        seen = asyncio.run(
            look_through(options.load().settings.broker, dead, asked.selection(asked.limit), first=EXCERPT)
        )
    warn_of_returns(seen.warning)
    excerpt = [(each.message_id, each.type, each.key, each.reason) for each in seen.first]
    return Loss(f"throw away {counted(seen.matched, 'letter')} of {dead} for good", seen.oldest, excerpt)


def _preview(options: RemoteOptions, entry: AuditEntry, asked: RetryLetters, output: Output) -> ExitCode:
    if options.server:
        done = options.operations().do(letters.preview, _looked_for(asked))
    else:  # which also finds letters whose queue is not there
        broker = options.load().settings.broker
        done = asyncio.run(preview_letters(broker, entry, asked.selection(asked.limit)))
    return report_letters(done, entry, output, is_preview=True)


def _change(options: RemoteOptions, entry: AuditEntry, asked: RetryLetters, *, output: Output) -> ExitCode:
    operation = letters.CHANGES[Kind(entry.command)]
    if options.server:
        with shown_letters(options.log_settings(), entry) as show:
            _, job = options.operations().finish(
                operation,
                asked,
                by=entry.done_by,
                show=lambda job: show(job.selected or job.done, job.done, job.failed),
            )
            done = done_by_console(job)
        return report_letters(done, entry, output)
    settings = options.load().settings
    job = options.operations().do(operation, asked, by=entry.done_by)
    return run_letters_job(settings, job, output)


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
