"""The exit codes of the `relay` command."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command has ended."""

    DONE = 0
    FAILED = 1  # or not ready, or the operator answered no
    USAGE = 2  # or configuration
    PARTLY = 3
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # as a program that SIGPIPE ended


def exit_code(*, done: int, left: int) -> ExitCode:
    """Return how a command has ended that changed `done` things of those it was given, and not `left` others."""
    if not left:
        return ExitCode.DONE
    return ExitCode.PARTLY if done else ExitCode.FAILED
