"""The committed dashboards."""

import json

from config.grafana.generate import DASHBOARDS, FOLDER

UIDS = list(DASHBOARDS)


def expressions(uid: str) -> list[str]:
    """Return the expressions of the committed dashboard."""
    panels = json.loads((FOLDER / f"{uid}.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]
