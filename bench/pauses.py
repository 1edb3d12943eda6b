"""How long nothing is delivered when a server fails: `python -m bench.pauses`, beside a client that does without us.

Three faults under a steady load: the node that leads the queue is killed, the only broker is restarted, the primary of
PostgreSQL is killed and its standby promoted. Beside the relay a plain client of the same server goes on with one
message or row after the other: what it waits, the server itself takes. See docs/benchmarks.md.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from cyclopts import App

from bench.frame import report
from bench.frame.command import CountOrNone, Positive, main
from bench.pauses_case import Fault, Pause, Stand, kill_leader, kill_primary, restart_broker
from tests.support.cluster import Cluster, why_not
from tests.support.folders import temporary_folder
from tests.support.pair import Pair
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitServer

app = App(name="python -m bench.pauses", help="Measure the pauses of delivery when a server fails.", version_flags=[])
console = report.open_console()


@app.default
def pauses(
    *,
    leader_rounds: CountOrNone = 5,
    broker_rounds: CountOrNone = 5,
    primary_rounds: CountOrNone = 5,
    rate: Positive = 500.0,
    seconds: Positive = 4.0,
) -> int:
    """Print a table; write JSON and a plot to bench/results/. Exit code 1 when a message was lost.

    Parameters
    ----------
    leader_rounds
        How often the node of the queue's leader is killed, in a cluster of three; 0 leaves it out. It takes root.
    broker_rounds
        How often the only broker is restarted; 0 leaves it out.
    primary_rounds
        How often the primary of a synchronous pair is killed; 0 leaves it out.
    rate
        Messages a second, from four writers together.
    seconds
        How long they write before each fault, and after everything goes on.
    """
    logging.disable(logging.CRITICAL)  # the AMQP library logs every failed connection, fifty a second
    measured: list[Pause] = []
    if leader_rounds and (reason := why_not()) is not None:
        console.print(f"left out: {Fault.LEADER} ({reason})")
        leader_rounds = 0
    with temporary_folder() as folder:
        stand = Stand(folder, rate, seconds)
        if leader_rounds:
            with console.status("starting a cluster"), PostgresServer(durable=True) as postgres, Cluster() as cluster:
                measured += _rounds(leader_rounds, lambda number: kill_leader(stand, postgres, cluster, number))
        if broker_rounds:
            with (
                console.status("starting a broker"),
                PostgresServer(durable=True) as postgres,
                RabbitServer() as broker,
            ):
                measured += _rounds(broker_rounds, lambda number: restart_broker(stand, postgres, broker, number))
        if primary_rounds:
            with console.status("starting a pair"), Pair() as pair, RabbitServer() as broker:
                measured += _rounds(primary_rounds, lambda number: kill_primary(stand, pair, broker, number))
    return _report(measured, {"rate": rate, "seconds": seconds})


def _rounds(rounds: int, measure: Callable[[int], Pause]) -> list[Pause]:
    measured = []
    for number in range(1, rounds + 1):
        with console.status(f"round {number} of {rounds}"):
            measured.append(one := measure(number))
        console.print(
            f"round {number}/{rounds}  {one.fault}: {one.pause:.2f} s, without us {one.own:.2f} s"
            f"  ({one.rate:.0f} messages/s before)  lost {one.lost}"
        )
    return measured


def _report(measured: Sequence[Pause], options: dict[str, Any]) -> int:
    lines: list[list[str]] = []
    bars: dict[str, report.Spread] = {}
    summary = {}
    for fault in Fault:
        rounds = [one for one in measured if one.fault is fault]
        if not rounds:
            continue
        pause = report.spread([one.pause for one in rounds])
        own = report.spread([one.own for one in rounds])
        ratio = report.spread([one.ratio for one in rounds])
        repeats = report.spread([one.repeats for one in rounds])
        lost = sum(one.lost for one in rounds)
        figures = [part for each in (pause, own, ratio) for part in (each.shown(2), each.range_shown(2))]
        lines.append([str(fault), *figures, repeats.range_shown(), str(lost)])
        bars |= {str(fault): pause, f"{fault}: without us": own}
        summary[fault.name.lower()] = {
            "pause": asdict(pause),
            "own": asdict(own),
            "ratio": asdict(ratio),
            "repeats": asdict(repeats),
            "lost": lost,
        }

    columns = ["", "relay, s", "range", "own, s", "range", "ratio", "range", "repeats", "lost"]
    title = f"Longest time without a delivery at {options['rate']:g} messages a second, and the server's own: medians"
    report.print_table(console, title, columns, lines)
    figures_of_all = {"options": options, "summary": summary, "rounds": [asdict(one) for one in measured]}
    plot = report.plot_bars("pauses", "Longest time without a delivery", "seconds", bars, digits=2)
    report.print_files(console, report.write_json("pauses", figures_of_all), plot)
    return 1 if any(one.lost for one in measured) else 0


if __name__ == "__main__":
    main(app)
