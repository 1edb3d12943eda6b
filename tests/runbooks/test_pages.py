"""Each alert has a runbook, and each runbook answers the same questions."""

import re
from pathlib import Path

import pytest

from tests.observe.rules import rules
from tests.runbooks.repair import RUNBOOKS, commands

QUESTIONS = ["Users notice", "Look here", "Repair", "Prevent"]
ALERTS = sorted({rule["alert"] for rule in rules()})
TESTS = Path(__file__).parent


def test_each_alert_has_its_page_and_each_page_its_alert() -> None:
    assert sorted(page.stem for page in RUNBOOKS.glob("Outbox*.md")) == ALERTS


def test_the_index_names_each_page() -> None:
    named = re.findall(r"\[(Outbox\w+)\]\(\1\.md\)", (RUNBOOKS / "README.md").read_text())

    assert sorted(named) == ALERTS


@pytest.mark.parametrize("alert", ALERTS)
def test_a_page_answers_each_question_in_order(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()

    assert text.startswith(f"# {alert}\n\n")
    assert re.findall(r"^\*\*([^*]+):\*\*", text, re.MULTILINE) == QUESTIONS
    assert commands(alert).strip()


def test_a_test_runs_each_repair() -> None:
    run = set(re.findall(r'"(Outbox\w+)"', "".join(file.read_text() for file in TESTS.glob("test_*repair*.py"))))

    assert run == set(ALERTS)
