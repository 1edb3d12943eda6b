"""`relay completion`."""

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from relay.cli.command import app
from relay.cli.exit_code import ExitCode


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Which shell reads it.")], /
) -> ExitCode:
    """Print a script by which a shell completes commands and flags: `source <(relay completion bash)`."""
    sys.stdout.write(app().generate_completion(shell=shell))
    return ExitCode.DONE
