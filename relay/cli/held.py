"""`relay held`."""

from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.consent import Audit
from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteDatabaseOptions
from relay.cli.options import DatabaseOptions, FailureGroup, InboxOptions, Most, Output, check_choice
from relay.cli.printing import counted, print_json, print_table, say
from relay.observe.printable import utc
from relay.operate import held
from relay.operate.held import HeldMessage, list_held
from relay.operate.session import open_tables

app = App(name="held", help="See the messages that consumers hold, and let them be tried now.")

COLUMNS = ("consumer", "key", "message id", "event", "attempts", "held", "due", "error")


@app.command(name="list")
def list_(
    *,
    options: DatabaseOptions = DatabaseOptions(),
    inbox: InboxOptions = InboxOptions(),
    consumer: Annotated[str | None, Parameter(help="Only of this consumer.")] = None,
    limit: Most = 100,
    output: Output = "text",
) -> ExitCode:
    """List held messages, those of a key in order; what was not tried waits behind the first."""
    database = inbox.settings(options.load().settings.database)
    with open_tables(database, lack="held messages") as tables:
        messages = list_held(tables, consumer=consumer, limit=limit)
    if output == "json":
        print_json(messages)
    else:
        print_table(COLUMNS, [_row(each) for each in messages], wide={"held"})
    return ExitCode.DONE


@app.command
def retry(
    *,
    options: RemoteDatabaseOptions = RemoteDatabaseOptions(),
    group: FailureGroup = None,
    all_: Annotated[bool, Parameter(name="--all", help="Of every group; needed when there is no --group.")] = False,
    audit: Audit = Audit(),
    output: Output = "text",
) -> ExitCode:
    """Let consumers try what failed now, in place of waiting for the next try; what waits behind it follows."""
    check_choice(is_filtered=group is not None, is_all=all_, choices="--group, or --all for every held message")
    audit.check_reason()
    asked = held.RetryHeld.model_construct(group=group, all=all_, why=audit.reason)
    retried = options.operations().do(held.retry, asked, by=audit.operator)
    if output == "json":
        print_json(dict(retried))
    else:
        say(f"{counted(retried.messages, 'message')} will be tried within seconds")
    return ExitCode.DONE


def _row(message: HeldMessage) -> tuple[object, ...]:
    moments = (utc(message.held_at), message.due_at and utc(message.due_at))
    kind = (message.consumer, message.key, message.message_id, message.event_type)
    return (*kind, message.attempts, *moments, message.error)
