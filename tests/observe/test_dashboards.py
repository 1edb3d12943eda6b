"""The dashboards in config/grafana are what the module there generates, of metrics that there are."""

import json
import re
from typing import Any

import pytest

from config.grafana.generate import FOLDER, as_json
from tests.observe.dashboards import UIDS, expressions
from tests.observe.rules import PARTS_OF_A_METRIC, ROOT, all_rules


@pytest.mark.parametrize("uid", UIDS)
def test_the_committed_dashboard_is_the_generated_one(uid: str) -> None:
    assert (FOLDER / f"{uid}.json").read_text() == as_json(uid), "run python -m config.grafana.generate"


def test_no_other_dashboard_is_committed() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(UIDS)


@pytest.mark.parametrize("uid", UIDS)
def test_each_panel_and_each_query_is_told_apart(uid: str) -> None:
    panels: list[dict[str, Any]] = json.loads((FOLDER / f"{uid}.json").read_text())["panels"]

    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(letters)) == len(letters)


def test_every_metric_of_the_dashboards_is_documented_or_recorded() -> None:
    documented = set(
        re.findall(r"^- `((?:outbox|process)_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    )
    recorded = {rule["record"] for rule in all_rules() if "record" in rule}
    text = " ".join(each for uid in UIDS for each in expressions(uid))

    named = {PARTS_OF_A_METRIC.sub("", name) for name in re.findall(r"\b(?:outbox|process)_\w+\b(?!:)", text)}

    assert named - documented == set()
    assert set(re.findall(r"\boutbox:[\w:]+", text)) <= recorded


def test_every_documented_metric_is_on_a_dashboard() -> None:
    documented = set(re.findall(r"^- `(outbox_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    text = " ".join(each for uid in UIDS for each in expressions(uid))

    assert {name for name in documented if name not in text} == set()
