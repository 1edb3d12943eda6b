"""Each alert and each reason has a runbook, and each runbook answers the same questions."""

import re
from pathlib import Path

import pytest

from relay.operate.runbooks import Runbook
from tests.observe.rules import rules
from tests.runbooks.repair import RUNBOOKS, commands

QUESTIONS = ["Users notice", "Look here", "Repair", "Prevent"]
ALERTS = {rule["alert"] for rule in rules()}
PAGES = sorted(ALERTS | {*Runbook})
# What a repair may do at the broker: docs/topology.md names the rights of the relay's user, by name.
EVERYTHING = re.compile(r"\.\*|set_user_tags|administrator|GRANT|SUPERUSER")
TESTS = Path(__file__).parent


def test_each_alert_and_reason_has_its_page_and_each_page_one_of_them() -> None:
    assert sorted(page.stem for page in RUNBOOKS.glob("Outbox*.md")) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_no_repair_asks_for_wider_rights_than_the_relay_needs(name: str) -> None:
    assert EVERYTHING.findall(commands(name)) == []
    assert "(../topology.md#permissions)" in (RUNBOOKS / f"{name}.md").read_text() or "permissions" not in commands(
        name
    )


def test_the_index_names_each_page() -> None:
    named = re.findall(r"\[(Outbox\w+)\]\(\1\.md\)", (RUNBOOKS / "README.md").read_text())

    assert sorted(named) == PAGES


@pytest.mark.parametrize("alert", PAGES)
def test_a_page_answers_each_question_in_order(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()

    assert text.startswith(f"# {alert}\n\n")
    assert re.findall(r"^\*\*([^*]+):\*\*", text, re.MULTILINE) == QUESTIONS
    assert commands(alert).strip()


def test_a_test_runs_each_repair() -> None:
    run = set(re.findall(r'"(Outbox\w+)"', "".join(file.read_text() for file in TESTS.glob("test_*repair*.py"))))

    assert run == {*PAGES}
