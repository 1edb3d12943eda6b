"""How fast a backlog goes out: `python -m bench.drain`, next to a C client that publishes the same messages.

The relay's interval begins when the transaction that wrote the whole backlog commits, and ends when no row is
pending any more: reading, publishing, the broker's confirms and the marks of all rows lie in it. The C client's
begins with its first publish and ends with its last confirm. See docs/benchmarks.md.
"""

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum

from cyclopts import App

from bench.drain_case import REFERENCE, Case, Measured, measure
from bench.drain_report import print_drains
from bench.frame import backlog as table
from bench.frame import reference, report
from bench.frame.command import Count, main
from bench.frame.keys import Keys
from bench.frame.servers import Servers, private_servers
from relay.config.settings import Ordering

app = App(name="python -m bench.drain", help="Measure how fast the relay drains a backlog.", version_flags=[])
console = report.open_console()


class WhichOrdering(StrEnum):
    """What `--ordering` takes."""

    KEY = "key"
    PIPELINED = "pipelined"
    BOTH = "both"


class WhichKeys(StrEnum):
    """What `--keys` takes."""

    CDNOW = "cdnow"
    HOT = "hot"
    BOTH = "both"


@app.default
def drain(
    *,
    rounds: Count = 3,
    rows: Count = 200_000,
    hot_rows: Count = 20_000,
    ordering: WhichOrdering = WhichOrdering.BOTH,
    keys: WhichKeys = WhichKeys.BOTH,
    skip_reference: bool = False,
    profile: bool = False,
) -> int:
    """Print a table; write JSON and a plot to bench/results/. Exit code 1 when a message was lost.

    Parameters
    ----------
    rounds
        How often each case is measured; each round starts with another case.
    rows
        Rows in the backlog whose keys are drawn from the CDNOW purchases.
    hot_rows
        Rows in the backlog of a single key.
    ordering
        The relay's setting, or both.
    keys
        The keys of the backlog, or both.
    skip_reference
        Leave out the C client, and with it the ratios.
    profile
        Run the relay under cProfile, which slows it down; its figures go to bench/results/relay.pstats.
    """
    report.RESULTS.mkdir(exist_ok=True)
    measured: list[Measured] = []
    with private_servers(console, routing_key=table.ROUTING_KEY) as servers:
        program = None if skip_reference else reference.build(servers.folder)
        cases = _cases(servers, rows, hot_rows, ordering, keys)
        if not skip_reference:
            cases.insert(0, Case(cases[0].backlog, None))
        for number in range(1, rounds + 1):
            first = (number - 1) % len(cases)
            for case in cases[first:] + cases[:first]:
                with console.status(f"round {number} of {rounds}: {case.name}"):
                    statistics = report.RESULTS / "relay.pstats" if profile else None
                    measured.append(measure(servers, case, number, program=program, profile=statistics))
                _print_measured(measured[-1], rounds)

    options = {"rounds": rounds, "rows": rows, "hot_rows": hot_rows, "payload_bytes": table.PAYLOAD_BYTES}
    return _report(measured, [case.name for case in cases], options)


def _cases(servers: Servers, rows: int, hot_rows: int, ordering: WhichOrdering, keys: WhichKeys) -> list[Case]:
    kinds = [Keys.CDNOW, Keys.HOT] if keys is WhichKeys.BOTH else [Keys(keys)]
    both = [Ordering.KEY, Ordering.PIPELINED]
    orderings = both if ordering is WhichOrdering.BOTH else [Ordering(ordering)]
    with console.status("drawing the rows"):
        counts = {Keys.CDNOW: rows, Keys.HOT: hot_rows}
        backlogs = [table.prepare(servers.database_url, servers.folder, kind, counts[kind]) for kind in kinds]
    return [Case(backlog, each) for backlog in backlogs for each in orderings]


def _print_measured(one: Measured, rounds: int) -> None:
    console.print(f"round {one.round}/{rounds}  {one.case:22}  {one.rate:8,.0f} msg/s  lost {one.lost}")


def _report(measured: Sequence[Measured], names: Sequence[str], options: dict[str, int]) -> int:
    title = f"Backlog drained: median of {options['rounds']} rounds; CPU of each process in us a message"
    summary = print_drains(console, title, measured, names, reference=REFERENCE, of="of C")
    bars = {name: report.Spread(**figures["rate"]) for name, figures in summary.items()}
    figures = {"options": options, "summary": summary, "rounds": [asdict(one) for one in measured]}
    plot = report.plot_bars("drain", "Backlog drained, confirms and marks included", "messages a second", bars)
    report.print_files(console, report.write_json("drain", figures), plot)
    return 1 if any(one.lost for one in measured) else 0


if __name__ == "__main__":
    main(app)
