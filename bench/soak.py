"""What an hour of steady traffic does to relay, table and broker: `python -m bench.soak`. See docs/benchmarks.md.

Writers commit, the relay carries, a consumer takes. A line a minute tells how long commits waited for their confirms
and how large everything was; the end tells whether memory and table stay as they are.
"""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from cyclopts import App

from bench.frame import backlog as table
from bench.frame import report
from bench.frame.command import Positive, main
from bench.frame.servers import private_servers
from bench.frame.writers import BATCH, WRITERS
from bench.soak_case import Growth, Minute, Sample, Soaked, growths, soak
from bench.soak_plot import plot

MINUTE = 60.0

app = App(name="python -m bench.soak", help="Measure a long run: memory, table, waits.", version_flags=[])
console = report.open_console()


@app.default
def run(*, minutes: Positive = 60.0, rate: Positive = 2000.0, interval: Positive = 5.0, check: bool = False) -> int:
    """Print a line a minute; write JSON and a plot to bench/results/. Exit code 1 when a message was lost.

    Parameters
    ----------
    minutes
        How long it lasts.
    rate
        Rows a second, from eight writers together.
    interval
        Seconds between two looks at memory and table.
    check
        Exit with 1 also when memory or table are not flat; waits are only told, as they depend on the machine.
    """
    with private_servers(console, routing_key=table.ROUTING_KEY) as servers, console.status("") as status:

        def tell(sample: Sample) -> None:
            status.update(f"{sample.at / MINUTE:.1f} of {minutes:g} minutes, relay {sample.relay:.0f} MiB")

        soaked = soak(servers, rate, minutes * MINUTE, interval=interval, span=MINUTE, tell=tell)
    options = {"minutes": minutes, "rate": rate, "writers": WRITERS, "rows_a_transaction": BATCH, "interval": interval}
    return _report(soaked, options, check=check)


def _report(soaked: Soaked, options: dict[str, float], *, check: bool) -> int:
    columns = ["minute", "rows/s", "p50 ms", "p99 ms", "relay MiB", "in flight", "pending MiB", "dead rows"]
    columns += ["sent MiB", "RabbitMQ MiB"]
    lines = [_line(number, minute) for number, minute in enumerate(soaked.minutes, start=1)]
    title = f"Steady traffic of {soaked.written:,} rows: medians of each minute, in flight the most; lost {soaked.lost}"
    report.print_table(console, title, columns, lines)
    compared = growths(soaked, options["rate"])
    _print_growths(compared)
    figures = {
        "options": options,
        "written": soaked.written,
        "lost": soaked.lost,
        "growth": [{**asdict(one), "is_flat": one.is_flat} for one in compared],
        "minutes": [asdict(minute) for minute in soaked.minutes],
    }
    report.print_files(console, report.write_json("soak", figures), plot(soaked, MINUTE))
    *judged, _ = compared
    return 1 if soaked.lost or (check and not all(one.is_flat for one in judged)) else 0


def _line(number: int, minute: Minute) -> list[str]:
    samples = minute.samples
    if not samples:
        return [str(number), f"{minute.rate:,.0f}", f"{minute.p50:.1f}", f"{minute.p99:.1f}", *["-"] * 6]
    return [
        str(number),
        f"{minute.rate:,.0f}",
        f"{minute.p50:.1f}",
        f"{minute.p99:.1f}",
        f"{median(one.relay for one in samples):.1f}",
        str(max(one.in_flight for one in samples)),
        f"{median(one.pending for one in samples):.1f}",
        f"{median(one.dead_rows for one in samples):,.0f}",
        f"{median(one.sent for one in samples):,.0f}",
        f"{median(one.rabbitmq for one in samples):.0f}",
    ]


def _print_growths(compared: Sequence[Growth]) -> None:
    lines = []
    for one in compared:
        figures = [f"{value:.1f}" for value in (one.before, one.after, one.limit)]
        lines.append([one.name, *figures, "yes" if one.is_flat else "NO"])
    columns = ["", "second third", "last third", "at most", "flat"]
    report.print_table(console, "Medians of the last third next to the second", columns, lines)


if __name__ == "__main__":
    main(app)
