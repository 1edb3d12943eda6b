"""The alert rules name metrics that there are, and each fires, keeps quiet and ends when it should."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from relay.operate.packaged import PLACEHOLDER
from tests.observe.alert_cases import CASES, HEALTHY, Case
from tests.observe.rules import PARTS_OF_A_METRIC, ROOT, RULES, all_rules, rules

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: only root can install Prometheus"
)


def annotations(case: Case) -> dict[str, str]:
    """Return what Prometheus makes of the alert's annotations."""
    texts = next(rule["annotations"] for rule in rules() if rule["alert"] == case.alert)
    return {name: rendered(text, case) for name, text in texts.items()}


def rendered(text: str, case: Case) -> str:
    text = re.sub(r"\{\{ \$value( \| \w+)? \}\}", case.value, text)
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: case.labels[found[1]], text)


def test_every_metric_of_the_rules_is_documented() -> None:
    # tests/http/test_metrics.py shows that what is documented is what is served.
    documented = set(re.findall(r"^- `(outbox_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))

    named = {
        PARTS_OF_A_METRIC.sub("", name)
        for rule in all_rules()
        for name in re.findall(r"\boutbox_\w+\b(?!:)", rule["expr"] + str(rule.get("annotations", "")))
    }

    assert named
    assert named - documented == set()


def test_what_is_recorded_is_what_the_alerts_use() -> None:
    recorded = {rule["record"] for rule in all_rules() if "record" in rule}

    assert recorded == {name for rule in rules() for name in re.findall(r"\boutbox\w*:[\w:]+", rule["expr"])}
    assert "outbox:relays_wanted" in (ROOT / "docs" / "metrics.md").read_text()


def test_every_alert_has_what_an_operator_needs() -> None:
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"].keys() == {"severity"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"{PLACEHOLDER}/runbooks/{rule['alert']}"
    told = [(rule["alert"], rule["labels"]["severity"]) for rule in rules()]
    assert len(set(told)) == len(told)


def test_every_alert_has_a_case() -> None:
    assert {(case.alert, case.severity) for case in CASES} == {
        (rule["alert"], rule["labels"]["severity"]) for rule in rules()
    }


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr


@needs_promtool
def test_each_alert_fires_alone_keeps_quiet_and_ends(tmp_path: Path) -> None:
    for relays in {case.wanted for case in CASES}:
        written = RULES.read_text().replace("vector(1)", f"vector({relays})")
        (tmp_path / f"alerts-{relays}.yml").write_text(written)
    for number, case in enumerate(CASES):
        (tmp_path / f"{number:02}-{case.alert}.yml").write_text(yaml.safe_dump(promtool_file(case)))

    files = sorted(file.name for file in tmp_path.glob("[0-9]*.yml"))
    tested = subprocess.run(
        ["promtool", "test", "rules", *files], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert tested.returncode == 0, tested.stdout + tested.stderr


def promtool_file(case: Case) -> dict[str, Any]:
    """Return what `promtool test rules` reads."""
    firing = {
        "exp_labels": {**case.labels, "severity": case.severity},
        "exp_annotations": annotations(case),
    }
    told = {name.partition("{")[0] for name in case.series}
    series = case.series | {name: values for name, values in HEALTHY.items() if name.partition("{")[0] not in told}
    others = {rule["alert"] for rule in rules()} - {case.alert, *case.also}
    return {
        "rule_files": [f"alerts-{case.wanted}.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": case.interval,
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": case.quiet, "alertname": case.alert},
                    {"eval_time": case.fires, "alertname": case.alert, "exp_alerts": [firing]},
                    {"eval_time": case.over, "alertname": case.alert},
                    *({"eval_time": case.fires, "alertname": other} for other in sorted(others)),
                ],
            }
        ],
    }
