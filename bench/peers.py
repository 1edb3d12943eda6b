"""How fast a backlog goes out, next to other outbox relays from PyPI: `python -m bench.peers`.

Each peer drains its own table to the same queue, with publisher confirms, in the settings of its documentation or
the fastest that we found. The first call installs the peers from requirements/peers.txt into build/peers. See
docs/benchmarks.md.
"""

from enum import StrEnum
from functools import partial

from bench.frame import backlog as table
from bench.frame import reference
from bench.frame.backlog import Keys
from bench.frame.drains import CPU, RATE, drain_backlog, publish_backlog
from bench.frame.peer import Peer, drain_peer, install
from bench.frame.relay import BenchRelay
from bench.frame.run import Bench, Column, Count, main
from bench.frame.servers import private_servers
from relay.config.settings import Ordering


class WhichSettings(StrEnum):
    """What `--settings` takes."""

    DEFAULT = "default"
    TUNED = "tuned"
    BOTH = "both"


def txoutbox(*, batch: int, concurrency: int) -> Peer:
    """Return txoutbox, which publishes the rows of one batch, one a key at a time, and then marks all of them."""
    return Peer(
        program="txoutbox_relay.py",
        settings=(batch, concurrency),
        table="txoutbox",
        fill="""
            INSERT INTO txoutbox (topic, key, payload)
            SELECT aggregate_type || '.' || event_type, aggregate_id, convert_to(payload, 'UTF8')
            FROM staged ORDER BY number LIMIT %(rows)s
        """,
        last_pending="SELECT FROM txoutbox WHERE status = 'pending' ORDER BY id DESC LIMIT 1",
        doorbell=("txoutbox", ""),
    )


def faststream_outbox(*, workers: int, batch: int, deletes: int) -> Peer:
    """Return faststream-outbox: each worker publishes one row at a time, and deletes some at once, without order."""
    return Peer(
        program="faststream_relay.py",
        settings=(workers, batch, deletes),
        table="faststream_outbox",
        fill="""
            INSERT INTO faststream_outbox (queue, payload, headers)
            SELECT
                'faststream_outbox',
                convert_to(payload, 'UTF8'),
                jsonb_build_object('content-type', 'application/json', 'correlation_id', message_id)
            FROM staged ORDER BY number LIMIT %(rows)s
        """,
        last_pending="SELECT FROM faststream_outbox ORDER BY id DESC LIMIT 1",
        doorbell=("outbox_faststream_outbox", "faststream_outbox"),
    )


# `default` is what each documents as such; `tuned` the fastest of what its documentation lets one set.
PEERS = {
    "txoutbox": {
        WhichSettings.TUNED: txoutbox(batch=1000, concurrency=1000),
        WhichSettings.DEFAULT: txoutbox(batch=50, concurrency=10),
    },
    "faststream-outbox": {
        WhichSettings.TUNED: faststream_outbox(workers=50, batch=1000, deletes=100),
        WhichSettings.DEFAULT: faststream_outbox(workers=1, batch=10, deletes=1),
    },
}


def measure(
    *,
    rounds: Count = 3,
    rows: Count = 100_000,
    peer_rows: Count = 10_000,
    settings: WhichSettings = WhichSettings.BOTH,
    run: Bench,
) -> None:
    """Measure how fast the relay and other outbox relays drain a backlog.

    Parameters
    ----------
    rounds
        How often each side is measured; each round starts with another one.
    rows
        Rows in the backlog of the relay and the C client; their keys are drawn from the CDNOW purchases.
    peer_rows
        How many of them each peer gets: it is slower, and would take minutes for all.
    settings
        The settings of the peers, or both. Ratios are to the tuned ones, unless only `default` is measured.
    """
    chosen = [WhichSettings.TUNED, WhichSettings.DEFAULT] if settings is WhichSettings.BOTH else [settings]
    ratios = [Column(f"of {name}", "rate", 2, is_ratio=True, reference=f"{name}, {chosen[0]}") for name in PEERS]
    drained = run.table(
        "Backlog drained; CPU of each process in us a message",
        RATE,
        Column("of C", "rate", 2, is_ratio=True),
        *ratios,
        *CPU,
    )
    with run.status("installing the peers"):
        python = install()
    with private_servers(run, routing_key=table.ROUTING_KEY) as servers:
        with run.status("drawing the rows"):
            backlog = table.prepare(servers.database_url, servers.folder, Keys.CDNOW, max(rows, peer_rows))
        sides = {reference.NAME: partial(publish_backlog, servers, backlog, reference.build(servers.folder))}
        for ordering in Ordering:
            relay = BenchRelay(*servers.urls, servers.folder, ordering)
            sides[f"relay, {ordering}"] = partial(drain_backlog, servers, backlog, relay)
        for name, by_settings in PEERS.items():
            for which in chosen:
                sides[f"{name}, {which}"] = partial(
                    drain_peer, servers, backlog, by_settings[which], python=python, rows=peer_rows
                )
        drained.measure(sides, rounds)


if __name__ == "__main__":
    main(measure)
