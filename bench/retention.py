"""What the drop of a day does to writers and marks: `python -m bench.retention`. See docs/benchmarks.md."""

from collections.abc import Sequence
from dataclasses import asdict

from cyclopts import App

from bench.frame import backlog as table
from bench.frame import report
from bench.frame.command import Count, main
from bench.frame.servers import private_servers
from bench.frame.writers import writer_pool
from bench.retention_case import DROPPED, HELD, NOTHING, PLAIN_HELD, Measured, measure

LIMIT = 50.0  # milliseconds that a writer may wait for a lock while a day is dropped
ROWS_BESIDE = 1000  # in the day of a case whose waits do not depend on its size
COLUMNS = [
    "",
    "drop, s",
    "commit p50, ms",
    "p99",
    "longest",
    "longest from mark to mark",
    "writer waited",
    "relay waited",
]

app = App(name="python -m bench.retention", help="Measure who waits while a day is dropped.", version_flags=[])
console = report.open_console()


@app.default
def measure_all(*, rounds: Count = 1, rows: Count = 5_000_000) -> int:
    """Print a table; write JSON to bench/results/. Exit code 1 when a drop let a writer wait, or a message was lost.

    Parameters
    ----------
    rounds
        How often each case is measured.
    rows
        Sent rows of the day that is dropped.
    """
    measured: list[Measured] = []
    with private_servers(console, routing_key=table.ROUTING_KEY) as servers, writer_pool() as pool:
        for number in range(1, rounds + 1):
            for case in (NOTHING, DROPPED, HELD, PLAIN_HELD):
                with console.status(f"{case}: round {number} of {rounds}"):
                    size = rows if case == DROPPED else ROWS_BESIDE
                    measured.append(measure(servers, pool, case, number, rows=size))
    lost = sum(one.lost for one in measured)
    waited = max(one.writer_waited for one in measured if one.case in (DROPPED, HELD))
    title = f"Writers and marks while a day of {rows:,} rows is dropped; milliseconds, the worst of {rounds} rounds"
    report.print_table(console, title, COLUMNS, [_row(case, measured) for case in (NOTHING, DROPPED, HELD, PLAIN_HELD)])
    console.print(f"lost messages: {lost}; longest wait of a writer for a drop: {waited:.0f} ms, {LIMIT:.0f} may be")
    figures = {"options": {"rounds": rounds, "rows": rows}, "lost": lost, "rounds": [asdict(one) for one in measured]}
    report.print_files(console, report.write_json("retention", figures))
    return 1 if lost or waited > LIMIT else 0


def _row(case: str, measured: Sequence[Measured]) -> list[str]:
    of_case = [asdict(one) for one in measured if one.case == case]
    worst = {name: max(one[name] for one in of_case) for name in of_case[0] if name != "case"}
    names = ("commit_p50", "commit_p99", "commit_longest", "mark_gap", "writer_waited", "relay_waited")
    return [case, f"{worst['seconds']:.1f}", *(f"{worst[name]:.1f}" for name in names)]


if __name__ == "__main__":
    main(app)
