"""`relay held`."""

from typing import Annotated

from cyclopts import App, Parameter

from relay.cli.consent import Audit
from relay.cli.exit_code import ExitCode
from relay.cli.operations import RemoteDatabaseOptions
from relay.cli.options import FailureGroup, Output, check_choice
from relay.cli.printing import counted, print_json, say

app = App(name="held", help="Let consumers try the messages that they hold; `relay failures list --held` lists them.")


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
    messages = options.operations().retry_held(group, by=audit.operator, why=audit.reason)
    if output == "json":
        print_json({"messages": messages})
    else:
        say(f"{counted(messages, 'message')} will be tried within seconds")
    return ExitCode.DONE
