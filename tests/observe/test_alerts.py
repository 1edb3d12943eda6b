"""The alert rules name metrics that there are, and Prometheus' own tool takes them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config" / "prometheus" / "alerts.yml"


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: only root can install Prometheus"
)


def rules() -> list[dict[str, Any]]:
    """Return the alerts."""
    return [rule for rule in all_rules() if "alert" in rule]


def all_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_every_metric_of_the_alerts_is_documented() -> None:
    # tests/http/test_metrics.py shows that what is documented is what is served.
    documented = set(re.findall(r"^- `(outbox_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))

    named = {name for rule in rules() for name in re.findall(r"outbox_\w+", rule["expr"] + str(rule["annotations"]))}

    assert named
    assert named - documented == set()


def test_what_is_recorded_is_what_the_alerts_use() -> None:
    recorded = {rule["record"] for rule in all_rules() if "record" in rule}

    assert recorded == {name for rule in rules() for name in re.findall(r"outbox:\w+", rule["expr"])}
    for name in recorded:
        assert name in (ROOT / "docs" / "metrics.md").read_text()


def test_every_alert_has_what_an_operator_needs() -> None:
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
    assert len({rule["alert"] for rule in rules()}) == len(rules())


@needs_promtool
def test_prometheus_takes_the_alerts() -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr


# Three relays are wanted and one goes, for less than five minutes and for longer; then all are gone.
# `stale` is what Prometheus writes when a target does not answer.
FEWER = """
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'outbox_lanes_held{instance="one"}', values: '8x20 stale _x20'}
      - {series: 'outbox_lanes_held{instance="two"}', values: '8x9 stale _ 8x2 stale _x30'}
      - {series: 'outbox_lanes_held{instance="spare"}', values: '0x20 stale _x20'}
    alert_rule_test:
      - {eval_time: 9m, alertname: OutboxFewerRelays}
      - {eval_time: 12m, alertname: OutboxFewerRelays}
      - {eval_time: 19m, alertname: OutboxFewerRelays}
      - eval_time: 20m
        alertname: OutboxFewerRelays
        exp_alerts: [{exp_labels: {severity: warning}, exp_annotations: TWO_RUN}]
      - eval_time: 30m
        alertname: OutboxFewerRelays
        exp_alerts: [{exp_labels: {severity: warning}, exp_annotations: NONE_RUNS}]
"""


@needs_promtool
def test_fewer_relays_than_wanted_are_told(tmp_path: Path) -> None:
    (alert,) = (rule for rule in rules() if rule["alert"] == "OutboxFewerRelays")
    told = json.dumps(alert["annotations"])
    (tmp_path / "alerts.yml").write_text(RULES.read_text().replace("vector(1)", "vector(3)"))
    (tmp_path / "test.yml").write_text(
        FEWER.replace("TWO_RUN", told.replace("{{ $value }}", "2")).replace(
            "NONE_RUNS", told.replace("{{ $value }}", "0")
        )
    )

    tested = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert tested.returncode == 0, tested.stdout + tested.stderr
