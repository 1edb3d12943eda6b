"""How fast a backlog goes out: `python -m bench.drain`, next to a C client that publishes the same messages.

The relay's interval begins when the transaction that wrote the whole backlog commits, and ends when no row is
pending. Reading, publishing, the broker's confirms and the marks of all rows lie in it. The C client's
begins with its first publish and ends with its last confirm. See docs/benchmarks.md.
"""

from enum import StrEnum
from functools import partial

from bench.frame import backlog as table
from bench.frame import reference
from bench.frame.backlog import Keys
from bench.frame.drains import COST, RATE, drain_backlog, publish_backlog
from bench.frame.relay import BenchRelay
from bench.frame.run import RESULTS, Bench, Column, Count, main
from bench.frame.servers import private_servers
from relay.config.settings import Ordering


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


def measure(
    *,
    rounds: Count = 3,
    rows: Count = 200_000,
    hot_rows: Count = 20_000,
    ordering: WhichOrdering = WhichOrdering.BOTH,
    keys: WhichKeys = WhichKeys.BOTH,
    skip_reference: bool = False,
    profile: bool = False,
    run: Bench,
) -> None:
    """Measure how fast the relay drains a backlog.

    Parameters
    ----------
    rounds
        How often each side is measured; each round starts with another one.
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
        Sample the relay with py-spy, which needs root; the flame graphs go to bench/results/relay-ORDERING.svg.
    """
    RESULTS.mkdir(exist_ok=True)
    ratio = () if skip_reference else (Column("of C", "rate", 2, is_ratio=True),)
    drained = run.table("Backlog drained; CPU in us and WAL in bytes a message", RATE, *ratio, *COST)
    kinds = [Keys.CDNOW, Keys.HOT] if keys is WhichKeys.BOTH else [Keys(keys)]
    orderings = list(Ordering) if ordering is WhichOrdering.BOTH else [Ordering(ordering)]
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers:
        with run.status("drawing the rows"):
            counts = {Keys.CDNOW: rows, Keys.HOT: hot_rows}
            backlogs = [table.prepare(servers.database_url, servers.folder, kind, counts[kind]) for kind in kinds]
        sides = {}
        if not skip_reference:
            sides[reference.NAME] = partial(publish_backlog, servers, backlogs[0], reference.build(servers.folder))
        for backlog in backlogs:
            for each in orderings:
                graph = RESULTS / f"relay-{each}.svg" if profile else None
                relay = BenchRelay(*servers.urls, servers.folder, each, profile=graph)
                sides[f"{each}, {backlog.keys} keys"] = partial(drain_backlog, servers, backlog, relay)
        drained.measure(sides, rounds)


if __name__ == "__main__":
    main(measure)
