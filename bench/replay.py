"""How fast a replay goes, and what it costs live traffic: `python -m bench.replay`. See docs/benchmarks.md.

Three measurements: the rate of a replay next to that of a drain of the same rows; commit to confirm of live traffic
with a replay beside it and without; the memory of a replay of a million rows.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cyclopts import App

from bench.frame import backlog as table
from bench.frame import report
from bench.frame.backlog import Keys
from bench.frame.command import Count, CountOrNone, Positive, PositiveOrNone, main
from bench.frame.servers import Servers, private_servers
from bench.frame.writers import write_steadily
from bench.replay_case import Beside, Rates, measure_beside, measure_memory, measure_rates, running_live

WARM_UP = 3.0  # seconds of live traffic that do not count

Pair = tuple[Beside, Beside]  # live traffic alone, and beside a replay

app = App(name="python -m bench.replay", help="Measure replays: rate, live traffic beside one, memory.")
console = report.open_console()


@app.default
def replay(
    *,
    rounds: CountOrNone = 3,
    rows: Count = 200_000,
    live_rounds: CountOrNone = 3,
    live_rate: Positive = 1000.0,
    live_seconds: Positive = 30.0,
    replay_rate: PositiveOrNone = 0.0,
    memory_rows: CountOrNone = 1_000_000,
) -> int:
    """Print tables; write JSON to bench/results/. Exit code 1 when a message was lost.

    Parameters
    ----------
    rounds
        Rounds of a drain and a replay; 0 leaves them out.
    rows
        Rows that are drained and replayed.
    live_rounds
        Rounds of live traffic, each without a replay and with one; 0 leaves them out.
    live_rate
        Rows a second of the live traffic.
    live_seconds
        How long it lasts, each time.
    replay_rate
        What the replay beside it is told by `--rate`; 0: nothing, so that it finds its own pace.
    memory_rows
        Rows of the replay whose memory is measured; 0 leaves it out.
    """
    figures: dict[str, Any] = {
        "options": {"rows": rows, "live_rate": live_rate, "live_seconds": live_seconds, "replay_rate": replay_rate}
    }
    lost = 0
    with private_servers(console, routing_key=table.ROUTING_KEY) as servers:
        if rounds:
            rates = _measure_rates(servers, rounds, rows)
            figures["rate"] = _report_rates(rates)
            lost += sum(one.lost for one in rates)
        if live_rounds:
            pairs = _measure_live(
                servers, live_rounds, live_rate, live_seconds, rows=rows, replay_rate=replay_rate or None
            )
            figures["live"] = _report_live(pairs)
            lost += sum(alone.lost + beside.lost for alone, beside in pairs)
        if memory_rows:
            with console.status(f"a replay of {memory_rows:,} rows"):
                peak = measure_memory(servers, memory_rows)
            console.print(f"\nA replay of {memory_rows:,} rows held at most {peak:.0f} MiB")
            figures["memory"] = {"rows": memory_rows, "peak_mib": peak}
    figures["lost"] = lost
    console.print(f"lost messages: {lost}")
    report.print_files(console, report.write_json("replay", figures))
    return 1 if lost else 0


def _measure_rates(servers: Servers, rounds: int, rows: int) -> list[Rates]:
    with console.status("drawing the rows"):
        backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows)
    measured = []
    for number in range(1, rounds + 1):
        with console.status(f"drain and replay: round {number} of {rounds}"):
            measured.append(one := measure_rates(servers, backlog))
        console.print(f"rate {number}/{rounds}  drain {one.drain:,.0f} rows/s, replay {one.replay:,.0f} rows/s")
    return measured


def _measure_live(
    servers: Servers, rounds: int, rate: float, seconds: float, *, rows: int, replay_rate: float | None
) -> list[Pair]:
    pairs = []
    with running_live(servers) as live:
        with console.status("warming up"):
            write_steadily(live.writers, servers.database_url, rate, WARM_UP)
        for number in range(1, rounds + 1):
            measured: dict[bool, Beside] = {}
            for is_beside in (True, False) if number % 2 else (False, True):
                name = "beside a replay" if is_beside else "alone"
                with console.status(f"live traffic {name}: round {number} of {rounds}"):
                    one = measure_beside(live, rate, seconds, rows=rows, is_beside=is_beside, replay_rate=replay_rate)
                console.print(f"live {number}/{rounds}  p99 {report.quantile(one.latencies, 0.99):.1f} ms {name}")
                measured[is_beside] = one
            pairs.append((measured[False], measured[True]))
    return pairs


def _report_rates(rounds: Sequence[Rates]) -> dict[str, Any]:
    spreads = {
        "drain, rows a second": report.spread([one.drain for one in rounds]),
        "replay, rows a second": report.spread([one.replay for one in rounds]),
        "ratio": report.spread([one.replay / one.drain for one in rounds]),
        "drain, PostgreSQL's CPU, us a row": report.spread([one.drain_postgres for one in rounds]),
        "replay, PostgreSQL's CPU, us a row": report.spread([one.replay_postgres for one in rounds]),
    }
    lines = [
        [name, each.shown(digits), each.range_shown(digits)]
        for (name, each), digits in zip(spreads.items(), (0, 0, 2, 1, 1), strict=True)
    ]
    title = f"A replay next to a drain of the same rows: median of {len(rounds)} rounds"
    report.print_table(console, title, ["", "median", "lowest-highest"], lines)
    return {"rounds": [asdict(one) for one in rounds], **{name: asdict(each) for name, each in spreads.items()}}


def _report_live(pairs: Sequence[Pair]) -> dict[str, Any]:
    spreads = {}
    for title, share in (("p50", 0.5), ("p99", 0.99)):
        alone = [report.quantile(one.latencies, share) for one, _ in pairs]
        beside = [report.quantile(one.latencies, share) for _, one in pairs]
        spreads[f"{title} alone, ms"] = report.spread(alone)
        spreads[f"{title} beside a replay, ms"] = report.spread(beside)
        spreads[f"{title}, ratio"] = report.spread([b / a for a, b in zip(alone, beside, strict=True)])
    spreads["rows written a second alone"] = report.spread([one.rate for one, _ in pairs])
    spreads["rows written a second beside a replay"] = report.spread([one.rate for _, one in pairs])
    spreads["rows replayed meanwhile"] = report.spread([one.replayed for _, one in pairs])
    lines = [[name, each.shown(2), each.range_shown(2)] for name, each in spreads.items()]
    title = f"Live traffic, commit to confirm: median of {len(pairs)} rounds"
    report.print_table(console, title, ["", "median", "lowest-highest"], lines)
    return {name: asdict(each) for name, each in spreads.items()}


if __name__ == "__main__":
    main(app)
