"""`relay healthcheck`."""

from typing import Annotated

from cyclopts import Parameter

from relay.cli.exit_code import ExitCode
from relay.cli.options import DatabaseOptions
from relay.operate.health import check_health
from relay.operate.session import session


def healthcheck(
    *,
    options: DatabaseOptions = DatabaseOptions(),
    ready: Annotated[bool, Parameter(help="The relay must also be able to deliver.")] = False,
    node: Annotated[str | None, Parameter(help="Name of the relay, in place of relay.node.")] = None,
) -> ExitCode:
    """Exit with 0 if the relay of this host has a fresh heartbeat, else with 1 and the reason."""
    settings = options.load().settings
    with session(settings.database) as tables:
        check_health(tables, node or settings.relay.node, ready=ready)
    return ExitCode.DONE
