"""One word for one thing in the flags of all commands: an id stands alone, and each flag is one of these."""

import inspect
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.cli.tree import TREE, arguments

FLAGS = {
    # where the settings and the inbox are
    "--config", "--database-url", "--broker-url", "--server", "--inbox", "--inbox-schema", "--schema",
    "--database-schema",
    # which rows
    "--aggregate-type", "--aggregate-id", "--event-type", "--reason", "--exception", "--consumer", "--since", "--until",
    "--limit", "--all", "--held", "--archived", "--discarded", "--group", "--queue", "--kind", "--unique-business-key",
    "--grace", "--command", "--job", "--rows",
    # what to do, and by whom
    "--why", "--by", "--yes", "--dry-run", "--force", "--to-exchange", "--routing-key", "--rate", "--stages",
    "--payload", "--headers", "--discard",
    "--stop-when-failing", "--overwrite", "--trace", "--folder",
    "--keep", "--keep-batches", "--keep-inbox", "--sql", "--check", "--downgrade", "--lock-timeout", "--wait", "--node",
    "--ready",
    # declared events
    "--against", "--require", "--format",
    # users of the console
    "--role", "--file",
    # how it is shown
    "--output", "-o", "--full", "--watch", "-w", "--interval", "--console",
}  # fmt: skip


@pytest.mark.parametrize("command", TREE)
def test_its_flags_are_words_of_the_vocabulary(command: str) -> None:
    flags = {name for each in arguments(command) for name in each.names if name.startswith("-")}

    assert {flag for flag in flags if not flag.startswith(("--no-", "--empty-"))} <= FLAGS  # the library's, not taken


@pytest.mark.parametrize("command", TREE)
def test_what_stands_alone_has_no_flag(command: str) -> None:
    alone = [each for each in arguments(command) if each.field_info.is_positional]

    assert [name for each in alone for name in each.names if name.startswith("-")] == []


@pytest.mark.parametrize("command", TREE)
def test_its_function_takes_at_most_nine_values(command: str) -> None:
    function = TREE[command].default_command
    assert callable(function)

    assert len(inspect.signature(function).parameters) <= 9


def test_none_is_in_no_help_and_defaults_are(tmp_path: Path) -> None:
    relay = Command(tmp_path)

    told = relay("dead-letters", "retry", "--help").out + relay("parked", "list", "--help").out
    waits = relay("status", "--help").out

    assert "None" not in told
    assert "[default: text]" in told
    assert "--interval DURATION" in waits
    assert "[default: 2s]" in waits


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_the_commands_and_flags(shell: str, tmp_path: Path) -> None:
    script = Command(tmp_path)("completion", shell).out

    assert all(word in script for word in ("quarantine", "reroute", "routing-key"))
