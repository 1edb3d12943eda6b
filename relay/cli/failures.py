"""`relay failures`."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.exit_code import ExitCode
from relay.cli.job_runs import warn_of_returns
from relay.cli.options import InboxOptions, Options, Output
from relay.cli.printing import print_json, print_pairs, print_table
from relay.config.settings import Settings
from relay.database import connect
from relay.observe.log import keep_libraries_quiet
from relay.observe.printable import utc
from relay.operate.dead_letters.change import queues_of
from relay.operate.dead_letters.letter import Letter, Selection
from relay.operate.dead_letters.read import read_letters
from relay.operate.failures import Group, Where, group_letters, list_groups, list_held_groups, read_group, with_retries
from relay.operate.session import in_words, limit_statements, session

LIST_COLUMNS = (
    "group", "source", "count", "event", "place", "first", "last", "keys held", "retried", "cause",
)  # fmt: skip
REPAIRS = {
    Where.PARKED: "relay parked retry --group {id}",
    Where.QUARANTINE: "relay quarantine probe, or relay quarantine reroute --group {id}",
    Where.HELD: "the consumer tries again by itself; mend what its handler needs",
    Where.DEAD_LETTER: "relay dead-letters retry {place} --group {id}",
}

app = App(name="failures", help="See what failed, grouped by its cause.")

Queues = Annotated[
    list[str] | None, Parameter(name="--queue", help="Also the dead letters of this queue; may be repeated.")
]


@app.command(name="list")
def list_(
    *,
    options: Options = Options(),
    queues: Queues = None,
    held: Annotated[bool, Parameter(help="Also the messages that consumers hold.")] = False,
    inbox: InboxOptions = InboxOptions(),
    output: Output = "text",
) -> ExitCode:
    """List groups: parked rows, routes in quarantine, and with --queue and --held what consumers keep."""
    groups = _read(options.load().settings, queues or [], inbox if held else None)
    if output == "json":
        print_json(groups)
    else:
        print_table(LIST_COLUMNS, [_row(group) for group in groups], wide={"first"})
    return ExitCode.DONE


@app.command
def show(
    group: Annotated[str, Parameter(name="GROUP", help="Its id, as `list` tells it.")],
    /,
    *,
    options: Options = Options(),
    queues: Queues = None,
    held: Annotated[bool, Parameter(help="Also look at the messages that consumers hold.")] = False,
    inbox: InboxOptions = InboxOptions(),
    output: Output = "text",
) -> ExitCode:
    """Show one group, and which command repairs it."""
    found = read_group(_read(options.load().settings, queues or [], inbox if held else None), group)
    if output == "json":
        print_json(found)
        return ExitCode.DONE
    pairs: list[tuple[str, object]] = [
        (name.replace("_", " "), getattr(found, name)) for name in Group.__dataclass_fields__
    ]
    print_pairs([*pairs, ("repair", REPAIRS[found.source].format(id=found.id, place=found.place))])
    return ExitCode.DONE


def _read(settings: Settings, queues: Sequence[str], inbox: InboxOptions | None) -> list[Group]:
    keep_libraries_quiet()
    database = settings.database
    with session(database) as connection:
        groups = list_groups(connection, database.schema_name)
        for queue in queues:
            letters = _letters_of(settings, queue)
            groups += with_retries(connection, database.schema_name, letters)
    return groups if inbox is None else [*groups, *_held(inbox, settings)]


def _letters_of(settings: Settings, queue: str) -> list[Group]:
    _, dead = queues_of(queue)
    letters: list[Letter] = []
    read = asyncio.run(read_letters(settings.broker, dead, Selection(), lambda held: letters.append(held.letter)))
    warn_of_returns(read.warning)
    return group_letters(letters, dead)


def _held(inbox: InboxOptions, settings: Settings) -> list[Group]:
    database = inbox.settings(settings.database)
    lack = f"no held messages in schema {database.schema_name}"
    connection = connect(database)
    try:
        with in_words(connection, lack, database.command_timeout, url="--inbox"):
            limit_statements(connection, database.command_timeout)
            return list_held_groups(connection, database.schema_name)
    finally:
        connection.close()


def _row(group: Group) -> tuple[object, ...]:
    moments = (group.first_at and utc(group.first_at), group.last_at and utc(group.last_at))
    kind = (group.event_type, group.place)
    return (group.id, group.source, group.count, *kind, *moments, group.keys_held, group.retried, group.cause)
