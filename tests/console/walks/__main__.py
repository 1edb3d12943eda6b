"""`python -m tests.console.walks`: go all walks one after the other, and print how long the words take.

It imports pytest alone: what is imported before, pytest cannot rewrite.
"""

import os
import sys
from pathlib import Path

import pytest


class Table:
    """A plugin of pytest that keeps what each walk has noted."""

    def __init__(self) -> None:
        self.walks: list[dict[str, object]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        noted = dict(report.user_properties)
        if report.when == "call" and "cause" in noted:
            self.walks.append(noted if report.passed else {**noted, "repair": report.outcome})

    def lines(self) -> list[str]:
        """Return the table as Markdown."""
        heading = ["| Cause | The overview says | Seconds | Clicks | Repair |", "|---|---|---:|---:|---|"]
        return heading + [
            f"| {each['cause']} | {each.get('words')} | {each.get('seconds')} | {each.get('clicks', 0)} |"
            f" {each['repair']} |"
            for each in self.walks
        ]


def main(options: list[str]) -> int:
    """Return the exit code of pytest."""
    table = Table()
    ours = ["--quiet", "--override-ini=addopts=--import-mode=importlib", "-p", "no:randomly", "-n", "0"]
    code = pytest.main([*ours, *options, str(Path(__file__).parent)], plugins=[table])
    print("\n".join(table.lines()))
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
