"""The `relay` command: one file a command group; what they do is `relay.operate` and `relay.engine`.

Signals are heard before anything else is imported, which takes a third of a second.
Exit codes: 0 done, 1 failed or not ready, 2 usage or configuration, 3 partly done, 130 interrupted.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

UNTIL_TOLD = (["run"], ["pool", "run"], ["console"])  # commands that run until SIGTERM, and then end with 0
AT_ONCE = ["console", "user"]  # a command below one of them, which does not


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the process's own arguments unless given."""
    if arguments is None:
        _hear_signals(sys.argv[1:])
    from relay.errors import MissingExtraError, importing  # noqa: PLC0415

    try:
        with importing("relay"):
            from relay.cli.command import run_command  # noqa: PLC0415
    except MissingExtraError as error:
        sys.stderr.write(f"relay: {error}\n")
        return 2
    return run_command(arguments)


def runs_until_told(arguments: Sequence[str]) -> bool:
    """Whether the arguments name a command that runs until SIGTERM."""
    given = list(arguments)
    return given[: len(AT_ONCE)] != AT_ONCE and any(given[: len(command)] == command for command in UNTIL_TOLD)


def _hear_signals(arguments: list[str]) -> None:
    """Be stoppable from now on, until the command sets its own handlers."""
    if runs_until_told(arguments):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # who tells of new hosts or passwords must not end the process
        signal.signal(signal.SIGTERM, _leave)
    elif os.getpid() == 1:  # the kernel keeps from PID 1 every signal that it has no handler for
        signal.signal(signal.SIGTERM, _terminate)


def _leave(_number: int, _frame: FrameType | None) -> None:
    # Nothing has begun. No SystemExit: raised in a callback during an import, it would be printed and forgotten.
    os._exit(0)


def _terminate(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
