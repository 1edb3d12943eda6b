"""CPU time of whole servers, from /proc: the process, its children, and the children that already ended; memory."""

import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.frame.error import BenchmarkError

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
IDLE_SHARE = 0.08  # of one core; an idle broker takes 1-3 %


def cpu_seconds(root: int) -> float:
    """Return the CPU time that process `root` and everything it ever started have used.

    A child that ended is counted by its parent once that has waited for it, as the postmaster does with a backend.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name may contain spaces and parentheses: the fields that count stand behind the last one.
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we read: now its parent's
            continue
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    if root not in ticks:
        raise ProcessLookupError(f"process {root} has ended")

    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += ticks[pid]
        left += children[pid]
    return total / TICKS_PER_SECOND


def run_seconds(pid: int) -> float:
    """Return the CPU time of one process without threads, to the nanosecond: a tick is as long as many statements."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


class CpuMeter:
    """The CPU time of named groups of processes since it was made."""

    def __init__(self, **roots: Sequence[int]) -> None:
        self._roots = roots
        self._since, self._before = time.monotonic(), self._now()

    def micros(self, messages: int) -> dict[str, float]:
        """Return the microseconds a message, as `NAME_cpu`."""
        now = self._now()
        return {f"{name}_cpu": 1e6 * (now[name] - before) / messages for name, before in self._before.items()}

    def percents(self) -> dict[str, float]:
        """Return the percent of one core, by name."""
        now, passed = self._now(), time.monotonic() - self._since
        return {name: 100 * (now[name] - before) / passed for name, before in self._before.items()}

    def _now(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._roots.items()}


def wait_idle(*roots: int, timeout: float = 120.0) -> None:
    """Wait until the processes have done their chores of the last run (segments, snapshots, checkpoints).

    Raises:
        BenchmarkError: one is still busy; figures taken now would be wrong.
    """
    deadline = time.monotonic() + timeout
    quiet = 0
    while quiet < 2:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the servers are still busy after {timeout:g} s; a measurement now would be wrong")
        before = sum(map(cpu_seconds, roots))
        time.sleep(0.5)  # the length of the sample, not a guess at how long the chores take
        share = (sum(map(cpu_seconds, roots)) - before) / 0.5
        quiet = quiet + 1 if share < IDLE_SHARE * len(roots) else 0


def peak_bytes(pid: int) -> int:
    """Return how much memory a process held at one time at most; 0 when it has just ended."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0
