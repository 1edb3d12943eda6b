"""The committed alert rules."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config" / "prometheus" / "alerts.yml"
# No row confirmed within 5 s is a series of a histogram.
PARTS_OF_A_METRIC = re.compile(r"_(bucket|count|sum)$")


def rules() -> list[dict[str, Any]]:
    """Return the alerts."""
    return [rule for rule in all_rules() if "alert" in rule]


def all_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
