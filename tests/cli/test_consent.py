"""A command that destroys shows what would go and does it when a terminal's answer is yes."""

import pytest

from tests.cli.command import Command
from tests.operate.rows import Rows
from tests.support.terminal import Terminal


@pytest.mark.parametrize(
    ("answer", "code", "state"), [("y\n", 0, "discarded"), ("n\n", 1, "parked"), ("", 1, "parked")]
)
def test_a_terminal_is_asked(
    answer: str, code: int, state: str, relay: Command, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rows.parked()
    monkeypatch.setattr("sys.stdin", Terminal(answer))

    ended = relay("parked", "discard", "--all", "--why", "a test")

    assert ended.code == code
    excerpt, oldest, question = ended.err.splitlines()
    assert excerpt.startswith(f"{row}  invoice  1  InvoiceIssued  returned")
    assert oldest.startswith("the oldest is of 20")
    assert question == "discard 1 row, and release 0 held behind it? [y/N]"
    assert rows.states()[row][0] == state


@pytest.mark.parametrize(
    "command",
    [
        ["parked", "discard", "--all"],
        ["quarantine", "discard", "1"],
        ["dead-letters", "discard", "billing", "--all"],
        ["jobs", "cancel", "1"],
        ["retention"],
        ["migrate", "--downgrade", "base"],
    ],
    ids=" ".join,
)
def test_each_needs_a_reason_and_an_answer(command: list[str], relay: Command) -> None:
    no_answer, no_reason = relay(*command, "--why", "a test"), relay(*command, "--yes")

    assert (no_answer.code, no_answer.err) == (
        2,
        "relay: nobody can be asked here: --dry-run shows what would go, and --yes does it unasked\n",
    )
    assert (no_reason.code, no_reason.err) == (2, "relay: --why is needed: it is kept with who did it and when\n")
