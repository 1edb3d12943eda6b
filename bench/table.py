"""What the state of the table does to the relay: `python -m bench.table`. See docs/benchmarks.md.

Three measurements: the rate of a drain with ten million sent rows retained next to one without; that with a snapshot
held open next to one without; the relay's memory while it drains a million rows of 4 KiB.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cyclopts import App

from bench.drain_case import Measured
from bench.drain_report import print_drains
from bench.frame import backlog as table
from bench.frame import report
from bench.frame.backlog import Backlog, Keys
from bench.frame.command import Count, CountOrNone, main
from bench.frame.servers import Servers, private_servers, second_database
from bench.table_case import (
    NO_SNAPSHOT,
    NONE_RETAINED,
    RETAINED,
    SNAPSHOT,
    Course,
    Snapshotted,
    measure_memory,
    measure_retained,
    measure_snapshot,
    retain,
)

SHARES = (0.1, 0.5, 0.9)  # of the drain, after which the memory is told

app = App(name="python -m bench.table", help="Measure retained rows, an old snapshot, memory.", version_flags=[])
console = report.open_console()


@app.default
def measure(
    *,
    rows: Count = 200_000,
    retained_rounds: CountOrNone = 3,
    retained_rows: Count = 10_000_000,
    snapshot_rounds: CountOrNone = 3,
    memory_rows: CountOrNone = 1_000_000,
) -> int:
    """Print tables; write JSON to bench/results/. Exit code 1 when a message was lost.

    Parameters
    ----------
    rows
        Rows in the backlog that is drained.
    retained_rounds
        Rounds of a drain with sent rows retained and one without; 0 leaves them out.
    retained_rows
        Sent rows retained.
    snapshot_rounds
        Rounds of a drain with a snapshot held open and one without; 0 leaves them out.
    memory_rows
        Rows of 4 KiB, drained while the relay's memory is looked at; 0 leaves it out. They take 24 KiB of disk each.
    """
    figures: dict[str, Any] = {"options": {"rows": rows, "payload_bytes": table.PAYLOAD_BYTES}}
    lost = 0
    with private_servers(console, routing_key=table.ROUTING_KEY) as servers:
        if retained_rounds or snapshot_rounds:
            with console.status("drawing the rows"):
                backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows)
        if retained_rounds:
            drains = _measure_retained(servers, backlog, retained_rounds, retained_rows)
            figures["retained"] = {"rows": retained_rows, **_report_retained(drains, retained_rows)}
            lost += sum(one.lost for one in drains)
        if snapshot_rounds:
            snapshotted = _measure_snapshot(servers, backlog, snapshot_rounds)
            figures["snapshot"] = _report_snapshot(snapshotted)
            lost += sum(one.measured.lost for one in snapshotted)
        if memory_rows:
            with console.status(f"a backlog of {memory_rows:,} rows of 4 KiB"):
                course = measure_memory(servers, memory_rows)
            figures["memory"] = _report_memory(course)
            lost += course.lost
    figures["lost"] = lost
    console.print(f"lost messages: {lost}")
    report.print_files(console, report.write_json("table", figures))
    return 1 if lost else 0


def _measure_retained(servers: Servers, backlog: Backlog, rounds: int, retained: int) -> list[Measured]:
    measured = []
    with second_database(servers, "retained") as filled:
        with console.status(f"filling a table with {retained:,} sent rows"):
            retain(filled, retained)
        for number in range(1, rounds + 1):
            for is_retained in (True, False) if number % 2 else (False, True):
                name = RETAINED if is_retained else NONE_RETAINED
                with console.status(f"{name}: round {number} of {rounds}"):
                    where = filled if is_retained else servers
                    one = measure_retained(where, backlog, number, retained=retained, is_retained=is_retained)
                _print_measured(one, rounds)
                measured.append(one)
    return measured


def _measure_snapshot(servers: Servers, backlog: Backlog, rounds: int) -> list[Snapshotted]:
    measured = []
    for number in range(1, rounds + 1):
        for is_held in (True, False) if number % 2 else (False, True):
            with console.status(f"{SNAPSHOT if is_held else NO_SNAPSHOT}: round {number} of {rounds}"):
                one = measure_snapshot(servers, backlog, number, is_held=is_held)
            _print_measured(one.measured, rounds, f", {one.dead_mib:,.0f} MiB of dead rows")
            measured.append(one)
    return measured


def _print_measured(one: Measured, rounds: int, more: str = "") -> None:
    console.print(f"round {one.round}/{rounds}  {one.case:18}  {one.rate:8,.0f} msg/s  lost {one.lost}{more}")


def _report_retained(drains: Sequence[Measured], retained: int) -> dict[str, Any]:
    title = f"Drained with {retained:,} sent rows retained, and without; CPU of each process in us a message"
    return _report_pairs(title, drains, NONE_RETAINED, RETAINED)


def _report_snapshot(snapshotted: Sequence[Snapshotted]) -> dict[str, Any]:
    title = "Drained with a snapshot held open, and without; CPU of each process in us a message"
    summary = _report_pairs(title, [one.measured for one in snapshotted], NO_SNAPSHOT, SNAPSHOT)
    return {**summary, "dead_mib": [one.dead_mib for one in snapshotted]}


def _report_pairs(title: str, drains: Sequence[Measured], reference: str, other: str) -> dict[str, Any]:
    summary = print_drains(console, title, drains, [reference, other], reference=reference, of="ratio")
    return {"summary": summary, "rounds": [asdict(one) for one in drains]}


def _report_memory(course: Course) -> dict[str, Any]:
    after = {f"after {share:.0%}": course.at(share) for share in SHARES}
    shown = {"idle, before": course.resident[0], **after, "most that the kernel saw": course.peak}
    rate = course.rows / course.seconds
    title = f"The relay's memory, {course.rows:,} rows of 4 KiB drained at {rate:,.0f} msg/s; lost {course.lost}"
    report.print_table(console, title, ["", "MiB"], [[name, f"{mib:.1f}"] for name, mib in shown.items()])
    return {"rate": rate, "mib": shown, **asdict(course)}


if __name__ == "__main__":
    main(app)
