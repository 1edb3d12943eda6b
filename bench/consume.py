"""What the inbox costs a consumer, and what batches save: `python -m bench.consume`. See docs/benchmarks.md."""

from collections.abc import Sequence
from dataclasses import asdict

from cyclopts import App

from bench.consume_case import Consumed, measure
from bench.frame import backlog as table
from bench.frame import reference, report
from bench.frame.backlog import Keys
from bench.frame.command import Count, main
from bench.frame.servers import private_servers
from bench.programs.consumers import BATCH, CONCURRENCY, Kind

PARTS = ("consumer_cpu", "postgres_cpu", "rabbitmq_cpu")

app = App(name="python -m bench.consume", help="Measure a consumer with inbox next to a bare loop.", version_flags=[])
console = report.open_console()


@app.default
def consume(*, rounds: Count = 3, messages: Count = 20_000) -> int:
    """Print a table; write JSON and a plot to bench/results/. Exit code 1 when a message was lost or applied twice.

    Parameters
    ----------
    rounds
        How often each case is measured.
    messages
        How many are in the queue.
    """
    measured: list[Consumed] = []
    with private_servers(console, routing_key=table.ROUTING_KEY) as servers:
        program = reference.build(servers.folder)
        with console.status("drawing the messages"):
            backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, messages)
        kinds = list(Kind)
        for number in range(1, rounds + 1):
            first = (number - 1) % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                with console.status(f"round {number} of {rounds}: {kind}"):
                    measured.append(one := measure(servers, kind, number, backlog, program))
                console.print(f"round {number}/{rounds}  {kind:22}  {one.rate:8,.0f} msg/s")
    return _report(measured, {"rounds": rounds, "messages": messages, "concurrency": CONCURRENCY, "batch_size": BATCH})


def _report(measured: Sequence[Consumed], options: dict[str, int]) -> int:
    rates = {(one.kind, one.round): one.rate for one in measured}
    lines, used, summary, bars = [], [], {}, {}
    for kind in Kind:
        rounds = [one for one in measured if one.kind is kind]
        rate = bars[str(kind)] = report.spread([one.rate for one in rounds])
        ratios = {
            str(other): report.spread([one.rate / rates[other, one.round] for one in rounds])
            for other in (Kind.BARE, Kind.SINGLE)
        }
        cpu = {part: report.spread([getattr(one, part) for one in rounds]) for part in PARTS}
        shown = [part for ratio in ratios.values() for part in (ratio.shown(2), ratio.range_shown(2))]
        lines.append([str(kind), rate.shown(), rate.range_shown(), *shown])
        used.append([str(kind), *(part.shown() for part in cpu.values())])
        summary[str(kind)] = {
            "rate": asdict(rate),
            "ratios": {of: asdict(ratio) for of, ratio in ratios.items()},
            "cpu": {part: asdict(each) for part, each in cpu.items()},
        }
    columns = ["", "msg/s", "range", "of bare", "range", "of one", "range"]
    report.print_table(console, f"Applied once each: median of {options['rounds']} rounds", columns, lines)
    report.print_table(console, "CPU, us a message", ["", "consumer", "PostgreSQL", "RabbitMQ"], used)
    figures = {"options": options, "summary": summary, "rounds": [asdict(one) for one in measured]}
    plot = report.plot_bars("consume", "Messages applied once each", "messages a second", bars)
    report.print_files(console, report.write_json("consume", figures), plot)
    return 0


if __name__ == "__main__":
    main(app)
