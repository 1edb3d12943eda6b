"""`relay failures`."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter, validators

from relay.cli.exit_code import ExitCode
from relay.cli.job_runs import warn_of_returns
from relay.cli.operations import RemoteOptions
from relay.cli.options import InboxOptions, Output
from relay.cli.printing import aside, print_json, print_pairs, print_table
from relay.config.settings import Settings
from relay.errors import UsageError
from relay.observe.log import keep_libraries_quiet
from relay.observe.printable import utc
from relay.operate import failures
from relay.operate.asked import MAX_ID
from relay.operate.failures import Group, Where, by_weight, list_held_groups, read_group
from relay.operate.session import open_tables

LIST_COLUMNS = (
    "group", "source", "count", "event", "place", "first", "last", "keys held", "retried", "cause",
)  # fmt: skip
REPAIRS = {
    Where.PARKED: "relay parked retry --group {id}",
    Where.QUARANTINE: "relay quarantine probe, or relay quarantine reroute --group {id}",
    Where.HELD: "mend what its handler needs, then relay held retry --group {id}",
    Where.DEAD_LETTER: "relay dead-letters retry {place} --group {id}",
}

app = App(name="failures", help="See what failed, grouped by its cause.")

Queues = Annotated[
    list[str] | None, Parameter(name="--queue", help="Also the dead letters of this queue; may be repeated.")
]


@app.command(name="list")
def list_(
    *,
    options: RemoteOptions = RemoteOptions(),
    queues: Queues = None,
    held: Annotated[bool, Parameter(help="Also the messages that consumers hold.")] = False,
    inbox: InboxOptions = InboxOptions(),
    limit: Annotated[int, Parameter(help="The largest so many.", validator=validators.Number(gte=1))] = 100,
    output: Output = "text",
) -> ExitCode:
    """List groups, the 100 largest unless --limit says otherwise.

    Parked rows, routes in quarantine, and with --queue and --held what consumers keep.
    """
    groups, total = _read(options, queues or [], inbox if held else None, limit=limit)
    if output == "json":
        print_json(groups)
    else:
        print_table(LIST_COLUMNS, [_row(group) for group in groups], wide={"first"})
    if total > len(groups):
        aside(f"{total - len(groups)} smaller groups more: --limit {total} lists them all")
    return ExitCode.DONE


@app.command
def show(
    group: Annotated[str, Parameter(name="GROUP", help="Its id, as `list` tells it.")],
    /,
    *,
    options: RemoteOptions = RemoteOptions(),
    queues: Queues = None,
    held: Annotated[bool, Parameter(help="Also look at the messages that consumers hold.")] = False,
    inbox: InboxOptions = InboxOptions(),
    output: Output = "text",
) -> ExitCode:
    """Show one group, and which command repairs it."""
    groups, _ = _read(options, queues or [], inbox if held else None, group=group)
    found = read_group(groups, group)
    if output == "json":
        print_json(found)
        return ExitCode.DONE
    pairs: list[tuple[str, object]] = [
        (name.replace("_", " "), getattr(found, name)) for name in Group.__dataclass_fields__
    ]
    print_pairs([*pairs, ("repair", REPAIRS[found.source].format(id=found.id, place=found.place))])
    return ExitCode.DONE


def _read(
    options: RemoteOptions,
    queues: Sequence[str],
    inbox: InboxOptions | None,
    *,
    group: str | None = None,
    limit: int = MAX_ID,
) -> tuple[list[Group], int]:
    """Return the largest groups and how many there are; with an inbox also those of its held messages."""
    keep_libraries_quiet()
    is_elsewhere = inbox not in (None, InboxOptions())
    if is_elsewhere and options.server:
        raise UsageError("--inbox and --inbox-schema are not for --server: a console knows its own database alone")
    with_held = inbox is not None and not is_elsewhere
    operations = options.operations()
    if queues:
        asked = failures.LookForFailures.model_construct(queue=tuple(queues), held=with_held, group=group, limit=limit)
        found = operations.do(failures.look, asked)
    else:
        listed = failures.ListFailures.model_construct(held=with_held, group=group, limit=limit)
        found = operations.do(failures.list_, listed)
    for warning in found.warnings:
        warn_of_returns(warning)
    elsewhere = _held(inbox, options.load().settings) if inbox and is_elsewhere else []
    return by_weight([*found.groups, *elsewhere])[:limit], found.total + len(elsewhere)


def _held(inbox: InboxOptions, settings: Settings) -> list[Group]:
    with open_tables(inbox.settings(settings.database), lack="held messages", url="--inbox") as tables:
        return list_held_groups(tables)


def _row(group: Group) -> tuple[object, ...]:
    moments = (group.first_at and utc(group.first_at), group.last_at and utc(group.last_at))
    kind = (group.event_type, group.place)
    return (group.id, group.source, group.count, *kind, *moments, group.keys_held, group.retried, group.cause)
