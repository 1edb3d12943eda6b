"""`relay failures`."""

import asyncio
from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.exit_code import ExitCode
from relay.cli.options import InboxOptions, Options, Output
from relay.cli.printing import aside, print_json, print_pairs, print_table
from relay.config.settings import Settings
from relay.errors import NotFoundError
from relay.observe.log import keep_libraries_quiet
from relay.observe.printable import utc
from relay.operate.dead_letters.change import queues_of
from relay.operate.failures.cause import FailureKind
from relay.operate.failures.groups import Group, list_groups, list_held_groups, list_letter_groups
from relay.operate.session import session

LIST_COLUMNS = ("group", "kind", "count", "keys held", "retried", "first", "last", "event", "place", "cause")

app = App(name="failures", help="See what failed, in groups of one cause.")

Queues = Annotated[
    list[str], Parameter(name="--queue", help="Also the dead letters of this consumed queue; may be repeated.")
]


@app.command(name="list")
def list_(
    *,
    options: Options = Options(),
    inbox: InboxOptions = InboxOptions(),
    queue: Queues = [],  # noqa: B006  (nothing changes it)
    output: Output = "text",
) -> ExitCode:
    """List the groups of parked rows, quarantined routes and held messages, the largest of each kind first."""
    groups = _groups(options.load().settings, inbox, queue)
    if output == "json":
        print_json(groups)
        return ExitCode.DONE
    # On a terminal the cause needs the room; `show` prints the rest.
    print_table(LIST_COLUMNS, [_row(group) for group in groups], wide={"first", "retried"})
    if not groups:
        aside("nothing has failed")
    return ExitCode.DONE


@app.command
def show(
    group: Annotated[str, Parameter(help="Its id, as `list` tells it.")],
    /,
    *,
    options: Options = Options(),
    inbox: InboxOptions = InboxOptions(),
    queue: Queues = [],  # noqa: B006  (nothing changes it)
    output: Output = "text",
) -> ExitCode:
    """Show one group, and the commands that see and change what is in it."""
    found = [each for each in _groups(options.load().settings, inbox, queue) if each.id == group]
    if not found:
        raise NotFoundError(f"nothing that failed is in group {group}: see `relay failures list`")
    if output == "json":
        print_json(found[0])
        return ExitCode.DONE
    print_pairs([*((name.replace("_", " "), getattr(found[0], name)) for name in Group.__dataclass_fields__)])
    aside(_next(found[0], queue))
    return ExitCode.DONE


def _groups(settings: Settings, inbox: InboxOptions, queues: list[str]) -> list[Group]:
    database = settings.database
    with session(database) as connection:
        groups = list_groups(connection, database.schema_name)
    held = inbox.settings(database)
    with session(held) as connection:
        groups += list_held_groups(connection, held.schema_name)
    if queues:
        keep_libraries_quiet()
    for queue in queues:
        _, dead = queues_of(queue)
        groups += asyncio.run(list_letter_groups(settings.broker, dead))
    return groups


def _next(group: Group, queues: list[str]) -> str:
    """Return what an operator can do with a group."""
    match group.kind:
        case FailureKind.PARKED:
            return f"`relay parked retry --group {group.id} --stages 1,10,100,all` sends them again"
        case FailureKind.QUARANTINED:
            return f"`relay quarantine show {group.example}` has the rows; the relay tries the route by itself"
        case FailureKind.HELD:
            return "the consumer tries them by itself"
        case FailureKind.DEAD_LETTER:
            return f"`relay dead-letters retry {' '.join(queues)} --group {group.id} --why ...` sends them back"


def _row(group: Group) -> tuple[object, ...]:
    return (
        group.id,
        group.kind,
        group.count,
        group.keys_held,
        group.retried,
        group.first_at and utc(group.first_at),
        group.last_at and utc(group.last_at),
        group.event_type,
        group.place,
        group.cause,
    )
