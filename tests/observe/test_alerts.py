"""The alert rules name metrics that there are; Prometheus' own tool has the last word where it is installed."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config" / "prometheus" / "alerts.yml"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_every_metric_of_the_alerts_is_documented() -> None:
    # tests/http/test_metrics.py shows that what is documented is what is served.
    documented = set(re.findall(r"^\| `(outbox_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))

    named = {name for rule in rules() for name in re.findall(r"outbox_\w+", rule["expr"] + str(rule["annotations"]))}

    assert named
    assert named - documented == set()


def test_every_alert_has_what_an_operator_needs() -> None:
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
    assert len({rule["alert"] for rule in rules()}) == len(rules())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: it comes with Prometheus")
def test_prometheus_takes_the_alerts() -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr
