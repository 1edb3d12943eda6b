"""What a reconciliation holds in memory does not grow with the rows."""

import re
import subprocess
import sys

import pytest

from tests.cli.command import Command
from tests.operate.inboxes import Ends

MIB = 1024  # kB
RUN = """
import sys
from pathlib import Path
from relay.cli import main

code = main(sys.argv[1:])
sys.stderr.write(Path("/proc/self/status").read_text())
sys.exit(code)
"""


@pytest.mark.drills
def test_ten_times_as_many_rows_need_no_more_memory(relay: Command, ends: Ends, inbox_url: str) -> None:
    """100,000 rows are compared after 10,000; the peak of memory stays."""
    peaks = []
    for number in (10_000, 90_000):
        sent = ends.send(number)
        ends.apply(sent[: number * 9 // 10])
        peaks.append(peak(relay, "reconcile", "--since", "2h", "--inbox", inbox_url))

    assert peaks[1] - peaks[0] < 15 * MIB


def peak(relay: Command, *arguments: str) -> int:
    """Run a command that finds a difference, and give the most memory that it had at one time, in kB."""
    run = [sys.executable, "-c", RUN, *arguments]
    ended = subprocess.run(run, env=relay.environment({}), capture_output=True, text=True, timeout=100, check=False)
    found = re.search(r"VmHWM:\s+(\d+) kB", ended.stderr)
    assert ended.returncode == 1, ended.stderr
    assert found is not None
    return int(found[1])
