"""Several relays on one table: `python -m bench.nodes`. See docs/benchmarks.md.

How long a lane is not delivered when a node is killed, frozen, stopped in order or started; the rate of two nodes
beside that of one; and what ten idle ones cost.
"""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from cyclopts import App

from bench.drain_case import Measured
from bench.frame import backlog as table
from bench.frame import report
from bench.frame.backlog import Keys
from bench.frame.command import Count, CountOrNone, Positive, main
from bench.frame.servers import Servers, private_servers
from bench.nodes_case import Gap, Going, measure_drain, measure_gap, measure_idle, under_load

app = App(name="python -m bench.nodes", help="Measure what happens when relays come and go.", version_flags=[])
console = report.open_console()


@app.default
def nodes(
    *,
    killed: CountOrNone = 20,
    frozen: CountOrNone = 3,
    stopped: CountOrNone = 10,
    started: CountOrNone = 10,
    drains: CountOrNone = 3,
    rows: Count = 200_000,
    idle: CountOrNone = 10,
    idle_seconds: Positive = 20.0,
) -> int:
    """Print tables; write JSON to bench/results/. Exit code 1 when a message was lost.

    Parameters
    ----------
    killed, frozen, stopped, started
        How often one of two nodes is killed, frozen, stopped in order or started; 0 leaves it out.
    drains
        How often one node and two drain a backlog in turn.
    rows
        Rows of the backlog.
    idle
        How many nodes are idle together.
    idle_seconds
        How long they are watched.
    """
    rounds = {Going.KILLED: killed, Going.FROZEN: frozen, Going.STOPPED: stopped, Going.STARTED: started}
    figures: dict[str, Any] = {}
    with private_servers(console, routing_key=table.ROUTING_KEY) as servers:
        if any(rounds.values()):
            figures["gaps"] = _report_gaps(_gaps(servers, rounds))
        if drains:
            figures["drains"] = _drains(servers, drains, rows)
        if idle:
            with console.status(f"{idle} idle nodes"):
                relays, postgres = measure_idle(servers, idle, idle_seconds)
            lines = [
                ["relays", f"{relays:.2f}"],
                ["PostgreSQL", f"{postgres:.2f}"],
                ["sum", f"{relays + postgres:.2f}"],
            ]
            report.print_table(console, f"{idle} idle nodes: percent of one core", ["", "%"], lines)
            figures["idle"] = {"nodes": idle, "relays": relays, "postgres": postgres}
    report.print_files(console, report.write_json("nodes", figures))
    return 0


def _gaps(servers: Servers, rounds: dict[Going, int]) -> list[Gap]:
    measured = []
    with under_load(servers) as scene:
        for going, times in rounds.items():
            for number in range(1, times + 1):
                with console.status(f"{going}: round {number} of {times}"):
                    measured.append(one := measure_gap(scene, going, number))
                console.print(f"round {number}/{times}  {one.going}: {one.gap:.3f} s  (before {one.before:.3f} s)")
    return measured


def _report_gaps(measured: Sequence[Gap]) -> dict[str, Any]:
    lines: list[list[str]] = []
    summary = {}
    for going in Going:
        rounds = [one for one in measured if one.going is going]
        if rounds:
            gap, before = (report.spread([getattr(one, name) for one in rounds]) for name in ("gap", "before"))
            lines.append([str(going), *(each for one in (gap, before) for each in (one.shown(3), one.range_shown(3)))])
            summary[going.name.lower()] = {"gap": asdict(gap), "before": asdict(before), "rounds": len(rounds)}
    title = "Longest time without a confirm on a lane that changes hands, s: medians"
    report.print_table(console, title, ["", "gap", "range", "before", "range"], lines)
    return summary


def _drains(servers: Servers, rounds: int, rows: int) -> dict[str, Any]:
    with console.status("drawing the rows"):
        backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows)
    measured: dict[int, list[Measured]] = {1: [], 2: []}
    for number in range(rounds):
        for nodes in (1, 2) if number % 2 == 0 else (2, 1):
            with console.status(f"a backlog for {nodes}: round {number + 1} of {rounds}"):
                measured[nodes].append(measure_drain(servers, backlog, nodes))
    ratio = report.spread([two.rate / one.rate for one, two in zip(measured[1], measured[2], strict=True)])
    lines, figures = [], {"ratio": asdict(ratio)}
    for name, rounds_of in (("one node", measured[1]), ("two nodes", measured[2])):
        rate = report.spread([one.rate for one in rounds_of])
        cpu = [
            median(getattr(one, part) for one in rounds_of) for part in ("sender_cpu", "postgres_cpu", "rabbitmq_cpu")
        ]
        lines.append([name, rate.shown(), rate.range_shown(), *(f"{each:.1f}" for each in cpu)])
        figures[name] = asdict(rate)
    lines.append(["ratio", ratio.shown(2), ratio.range_shown(2), "", "", ""])
    title = f"Backlog drained, messages a second: median of {rounds}; CPU in us a message"
    report.print_table(console, title, ["", "", "range", "relays", "PostgreSQL", "RabbitMQ"], lines)
    return figures


if __name__ == "__main__":
    main(app)
