"""A relay that notes its confirms, and eight writers: commit to confirm."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from bench.frame.relay import BenchRelay
from bench.frame.servers import Servers
from bench.frame.watch import watching
from bench.frame.writers import Commit, writer_pool
from relay.config.settings import Ordering
from relay.testing.servers.process import Process


@dataclass(frozen=True, slots=True)
class WatchedRelay:
    """What a measurement needs at hand: the servers, a running relay, the connection that looks, the writers."""

    servers: Servers
    settings: BenchRelay
    relay: Process
    watch: psycopg.Connection
    writers: ProcessPoolExecutor

    def confirmed_at(self) -> dict[int, float]:
        """Return the moment of each confirm (Unix time) by outbox id."""
        return dict(self.settings.confirms.read())

    def waits(self, commits: Sequence[Commit]) -> list[float]:
        """Return the milliseconds from COMMIT's answer to the confirm, sorted; a row without a confirm is left out."""
        at = self.confirmed_at()
        return sorted(1000 * (at[commit.id] - commit.returned_at) for commit in commits if commit.id in at)


@contextmanager
def watched_relay(servers: Servers, ordering: Ordering = Ordering.KEY) -> Iterator[WatchedRelay]:
    """Start relay and writers, and stop them."""
    settings = BenchRelay(*servers.urls, servers.folder, ordering, is_noted=True)
    with watching(servers.database_url) as watch, writer_pool() as writers, settings.running() as relay:
        yield WatchedRelay(servers, settings, relay, watch, writers)
