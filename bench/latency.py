"""How long a commit waits for its confirm: `python -m bench.latency`; also what the relay costs while it waits.

Four measurements, one after the other with the same relay: commit to confirm under a steady load of overlapping
transactions; the same beside rows that cannot be delivered; CPU of relay and database with nothing to do; the commit
rate of writers who write as fast as they can, with the wake-up trigger and without. See docs/benchmarks.md.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cyclopts import App

from bench.frame import report
from bench.frame.command import CountOrNone, Positive, PositiveOrNone, main
from bench.frame.writers import WRITERS
from bench.guilty import Guilt
from bench.latency_case import (
    Idle,
    Innocence,
    Latencies,
    WriterRates,
    measure_idle,
    measure_innocents,
    measure_latency,
    measure_writers,
    standing,
)
from bench.latency_plot import plot
from relay.config.settings import Ordering

WARM_UP = 3.0  # seconds of the same load before the first round: statements prepared, caches filled
QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}

app = App(name="python -m bench.latency", help="Measure commit to confirm, the idle relay and writers.")
console = report.open_console()


@app.default
def latency(
    *,
    rounds: CountOrNone = 3,
    innocent_rounds: CountOrNone = 3,
    seconds: Positive = 20.0,
    rate: Positive = 500.0,
    idle_seconds: PositiveOrNone = 30.0,
    writer_rounds: CountOrNone = 5,
    writer_seconds: Positive = 8.0,
    ordering: Ordering = Ordering.KEY,
) -> int:
    """Print tables; write JSON and a plot to bench/results/. Exit code 1 when a message was lost.

    Parameters
    ----------
    rounds
        Rounds of the steady load; 0 leaves it out.
    innocent_rounds
        Rounds of that load beside rows that cannot be delivered, of each kind; 0 leaves them out.
    seconds
        How long each of them lasts.
    rate
        Rows a second, from eight writers together.
    idle_seconds
        How long the idle relay is watched; 0 leaves it out.
    writer_rounds
        Rounds with the trigger and without; 0 leaves them out.
    writer_seconds
        How long each half of them lasts.
    ordering
        The relay's setting.
    """
    options = {"rounds": rounds, "seconds": seconds, "rate": rate, "writers": WRITERS, "ordering": ordering.value}
    latencies: list[Latencies] = []
    innocents: list[Innocence] = []
    rates: list[WriterRates] = []
    with standing(console, ordering) as stand:
        with console.status("warming up"):
            measure_latency(stand, rate, WARM_UP)
        for number in range(1, rounds + 1):
            with console.status(f"commit to confirm: round {number} of {rounds}"):
                latencies.append(measure_latency(stand, rate, seconds))
            console.print(
                f"commit to confirm {number}/{rounds}  p50 {report.quantile(latencies[-1].from_returned, 0.5):.2f} ms"
            )
        for number in range(1, innocent_rounds + 1):
            for guilt in Guilt:
                with console.status(f"innocent keys while {guilt}: round {number} of {innocent_rounds}"):
                    innocents.append(measure_innocents(stand, rate, seconds, guilt))
                last = innocents[-1]
                console.print(f"{guilt} {number}/{innocent_rounds}  p99 {last.alone:.1f} ms, {last.beside:.1f} ms")
        idle = None
        if idle_seconds:
            with console.status(f"idle relay: {idle_seconds:g} s"):
                idle = measure_idle(stand, idle_seconds)
        for number in range(1, writer_rounds + 1):
            with console.status(f"writers flat out: round {number} of {writer_rounds}"):
                rates.append(measure_writers(stand, writer_seconds, number))
            console.print(f"writers {number}/{writer_rounds}  {rates[-1].trigger_on:,.0f} commits/s with the trigger")

    figures: dict[str, Any] = {"options": options}
    if latencies:
        figures["latency"] = _report_latency(latencies)
    if innocents:
        figures["innocents"] = _report_innocents(innocents)
    if idle is not None:
        figures["idle"] = _report_idle(idle)
    if rates:
        figures["writers"] = _report_writers(rates)
    report.print_files(console, report.write_json("latency", figures), plot(latencies, rates))
    lost = sum(one.lost for one in latencies) + sum(one.lost for one in innocents)
    return 1 if lost else 0


def _report_latency(rounds: Sequence[Latencies]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "written": sum(one.written for one in rounds),
        "lost": sum(one.lost for one in rounds),
        "out_of_order_share": report.spread([one.out_of_order for one in rounds]).median,
    }
    lines = []
    cases = {
        "from COMMIT's answer": "from_returned",
        "from COMMIT's request": "from_asked",
        "from COMMIT's answer to the mark": "to_mark",
    }
    for name, field in cases.items():
        spreads = {
            title: report.spread([report.quantile(getattr(one, field), share) for one in rounds])
            for title, share in QUANTILES.items()
        }
        figures[field] = {title: asdict(each) for title, each in spreads.items()}
        lines.append([name, *(f"{each.shown(2)}  ({each.range_shown(2)})" for each in spreads.values())])
    title = (
        f"Commit to confirm, ms: median of {len(rounds)} rounds (lowest-highest); {figures['written']:,} rows, "
        f"{figures['out_of_order_share']:.0%} of them visible after a higher id, lost {figures['lost']}"
    )
    report.print_table(console, title, ["", *QUANTILES], lines)
    return figures


def _report_innocents(rounds: Sequence[Innocence]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    lines = []
    for guilt in Guilt:
        of_guilt = [one for one in rounds if one.guilt is guilt]
        spreads = {
            name: report.spread([getattr(one, name) for one in of_guilt]) for name in ("alone", "beside", "ratio")
        }
        figures[guilt.name.lower()] = {name: asdict(each) for name, each in spreads.items()}
        lines.append([guilt, *(f"{each.shown(2)}  ({each.range_shown(2)})" for each in spreads.values())])
    lost = sum(one.lost for one in rounds)
    title = f"p99 of keys of which nothing is refused, ms: medians (lowest-highest); lost {lost}"
    report.print_table(console, title, ["", "alone", "beside", "ratio"], lines)
    return {**figures, "lost": lost}


def _report_idle(idle: Idle) -> dict[str, float]:
    shares = asdict(idle)
    lines = [["relay and PostgreSQL", f"{idle.relay + idle.postgres:.2f}"]]
    lines += [[f"  {name}", f"{share:.2f}"] for name, share in (("relay", idle.relay), ("PostgreSQL", idle.postgres))]
    lines.append(["RabbitMQ, for comparison", f"{idle.rabbitmq:.2f}"])
    report.print_table(console, "Nothing to do: percent of one core", ["", "%"], lines)
    return shares


def _report_writers(rounds: Sequence[WriterRates]) -> dict[str, Any]:
    spreads = {
        "with the trigger": report.spread([one.trigger_on for one in rounds]),
        "without": report.spread([one.trigger_off for one in rounds]),
        "ratio": report.spread([one.trigger_on / one.trigger_off for one in rounds]),
    }
    lines = [
        [name, each.shown(digits), each.range_shown(digits)]
        for (name, each), digits in zip(spreads.items(), (0, 0, 3), strict=True)
    ]
    title = f"{WRITERS} writers flat out, commits a second: median of {len(rounds)} rounds"
    report.print_table(console, title, ["", "median", "lowest-highest"], lines)
    return {"rounds": [asdict(one) for one in rounds], **{name: asdict(each) for name, each in spreads.items()}}


if __name__ == "__main__":
    main(app)
