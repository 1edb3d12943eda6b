"""Outbox relays of other projects: they run in an environment without this one, and each drains its own table."""

import os
import shutil
import signal
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import psycopg
from psycopg.sql import SQL, Identifier

from bench.frame import queue
from bench.frame.backlog import ROUTING_KEY, Backlog
from bench.frame.drains import drain
from bench.frame.error import BenchmarkError
from bench.frame.run import Figures
from bench.frame.servers import Servers
from bench.frame.watch import wait_until, watching
from relay.testing.servers.process import Process, run

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "peers.txt"
ENVIRONMENT = ROOT / "build" / "peers"
PROGRAMS = ROOT / "bench" / "programs"
READY_SECONDS = 30.0
DRAIN_SECONDS = 20.0

# The rows as the relay gets them, on their way into the peer's table.
STAGE = """
    CREATE TEMPORARY TABLE staged (
        number bigint GENERATED ALWAYS AS IDENTITY,
        message_id uuid, aggregate_type text, aggregate_id text, event_type text, payload text
    ) ON COMMIT DROP
"""
FILL_STAGED = "COPY staged (message_id, aggregate_type, aggregate_id, event_type, payload) FROM STDIN"
# The peer's own trigger would wake it once a row. One notification at the end, as the relay gets it, costs it less.
WITHOUT_TRIGGERS = "SET LOCAL session_replication_role = replica"
RING = "SELECT pg_notify(%s, %s)"


@dataclass(frozen=True, slots=True)
class Peer:
    """An outbox relay of another project, with its settings.

    Attributes:
        program: a file in bench/programs, which makes the peer's table and prints `ready`.
        settings: its arguments.
        fill: puts `rows` staged rows into the peer's table.
        last_pending: gives one row while the peer has work, found from the end of the table.
        doorbell: the channel and the text of the notification that wakes the peer up.
    """

    program: str
    settings: tuple[int, ...]
    table: str
    fill: LiteralString
    last_pending: LiteralString
    doorbell: tuple[str, str]

    @contextmanager
    def running(self, servers: Servers, python: Path) -> Iterator[Process]:
        """Start it, hand it over once it is ready, and stop it at the end.

        Raises:
            BenchmarkError: it did not exit with 0 when it was told to stop.
        """
        environment = {
            **os.environ,
            "PEER_DATABASE_URL": servers.database_url,
            "PEER_BROKER_URL": servers.broker_url,
            "PEER_EXCHANGE": queue.EXCHANGE,
            "PEER_ROUTING_KEY": ROUTING_KEY,
        }
        log = servers.folder / f"{self.table}.log"
        log.write_text("")
        command: list[str | Path] = [python, PROGRAMS / self.program, *map(str, self.settings)]
        peer = Process(command, log=log, environment=environment, name=self.table)
        try:
            peer.wait_until(lambda: "ready" in log.read_text(), READY_SECONDS)
            yield peer
        finally:
            peer.stop(signal.SIGTERM, DRAIN_SECONDS)
        if peer.returncode != 0:
            raise BenchmarkError(f"{self.table} did not stop: exit code {peer.returncode}\n{peer.log_end()}")


def install() -> Path:
    """Install the peers, unless they are, and return their Python.

    Raises:
        ServerError: pip could not install them; the message shows why.
    """
    python, installed = ENVIRONMENT / "bin" / "python", ENVIRONMENT / LOCK.name
    if installed.exists() and installed.read_bytes() == LOCK.read_bytes():
        return python
    venv.create(ENVIRONMENT, clear=True, with_pip=True)
    options = ["--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary=:all:"]
    run([python, "-m", "pip", "install", *options, "--requirement", LOCK])
    shutil.copyfile(LOCK, installed)
    return python


def drain_peer(servers: Servers, backlog: Backlog, peer: Peer, python: Path, *, rows: int) -> Figures:
    """Let a peer drain the first `rows` of a backlog out of a new table; the queue is empty before."""
    queue.purge(servers.broker_url)
    with watching(servers.database_url) as watch:
        watch.execute(SQL("DROP TABLE IF EXISTS {}").format(Identifier(peer.table)))

        def wait(_watch: psycopg.Connection, process: Process, *, look: Callable[[], None]) -> float:
            return wait_until(lambda: watch.execute(peer.last_pending).fetchone() is None, process, look=look)

        with peer.running(servers, python) as process:
            writing = _uncommitted(servers.database_url, backlog, peer, rows)
            return drain(servers, watch, [process], writing, rows=rows, wait=wait)


@contextmanager
def _uncommitted(database_url: str, backlog: Backlog, peer: Peer, rows: int) -> Iterator[psycopg.Connection]:
    """Fill the peer's table in a transaction that is still open, as `backlog.uncommitted` fills the relay's."""
    with psycopg.connect(database_url) as connection:
        connection.execute(STAGE)
        with connection.cursor().copy(FILL_STAGED) as copy, backlog.table_file.open("rb") as file:
            while block := file.read(1 << 20):
                copy.write(block)
        connection.execute(WITHOUT_TRIGGERS)
        connection.execute(peer.fill, {"rows": rows})
        connection.execute(SQL("ANALYZE {}").format(Identifier(peer.table)))
        connection.execute(RING, peer.doorbell)
        yield connection
