"""The metrics that docs/metrics.md lists, and the metrics that a process serves."""

import re
from pathlib import Path

from tests.http.site import Site

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
DOCUMENTED = re.compile(r"^- `(\w+)(?:\{[^}]*\})?` \((\w+)\): ", re.MULTILINE)

Metrics = set[tuple[str, str]]  # name and type


def documented(section: str) -> Metrics:
    """Return the metrics that this section of the page lists."""
    (text,) = (each for each in DOCUMENT.read_text().split("\n## ") if each.startswith(f"{section}\n"))
    found = set(DOCUMENTED.findall(text))
    assert len(found) > 10
    return found


async def served(site: Site) -> Metrics:
    """Return the metrics as Prometheus shows them: a counter's samples carry _total, an info is a gauge, _info."""
    lines = [line.split() for line in (await site.get("/metrics")).body.splitlines() if line.startswith("# TYPE ")]
    return {(name, kind) for _, _, name, kind in lines}
