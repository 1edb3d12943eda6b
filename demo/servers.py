"""The servers of the demo: private ones in .demo/, kept from run to run, or the reader's own."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from demo.report import Report
from relay.testing.servers.postgres import PostgresServer, can_serve_from
from relay.testing.servers.process import ServerError
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.releases import NEWEST

ROOT = Path(__file__).resolve().parents[1]
PLACE = Path(os.environ.get("DEMO_FOLDER", ROOT / ".demo"))  # tests have their own
DATABASE = "demo"
DATABASE_URL = "RELAY_DATABASE_URL"
BROKER_URL = "RELAY_BROKER_URL"
# What the demo counts in and waits for, whatever the reader has set for another relay.
FIXED = {"RELAY_DATABASE_SCHEMA": "outbox", "RELAY_LOG_LEVEL": "info"}


@contextmanager
def one_demo_at_a_time() -> Iterator[None]:
    """Hold .demo/ for ourselves.

    Raises:
        ServerError: another `make demo` is running in this checkout.
    """
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError("another `make demo` is running in this checkout; wait for it or end it") from None
        yield


def start_over() -> None:
    """Remove what the private servers kept.

    Raises:
        ServerError: the servers are the reader's, and what is in them is not ours to remove.
    """
    for variable in (DATABASE_URL, BROKER_URL):
        if os.environ.get(variable):
            raise ServerError(
                f"FRESH=1 does not empty your own servers: unset {variable}, or give another database and virtual host"
            )
    shutil.rmtree(_postgres_folder(), ignore_errors=True)
    (PLACE / "postgres").unlink(missing_ok=True)
    shutil.rmtree(PLACE / "rabbitmq", ignore_errors=True)


@contextmanager
def servers(report: Report) -> Iterator[dict[str, str]]:
    """Yield the environment of the demo's processes, with the URLs of both servers, which run meanwhile."""
    environment = {**os.environ, **FIXED}
    with ExitStack() as running:
        if not environment.get(DATABASE_URL):
            with report.step(f"PostgreSQL {NEWEST}, private") as step:
                # With fsync and all: the figures below are those of commits that survive a power cut.
                postgres = running.enter_context(PostgresServer(folder=_postgres_folder(), durable=True))
                step.note(f"port {postgres.port}, data in {_shown(_postgres_folder())}")
                if not postgres.has_database(DATABASE):
                    postgres.create_database(DATABASE)
                environment[DATABASE_URL] = postgres.url(DATABASE)
        if not environment.get(BROKER_URL):
            with report.step("RabbitMQ, private") as step:
                rabbitmq = running.enter_context(RabbitServer(folder=PLACE / "rabbitmq"))
                step.note(f"port {rabbitmq.port}, data in {_shown(PLACE / 'rabbitmq')}")
                environment[BROKER_URL] = rabbitmq.url()
        yield environment


def _postgres_folder() -> Path:
    """Return the folder in .demo/, or one it links to if PostgreSQL's user may not walk there (a checkout in /root)."""
    inside = PLACE / "postgres"
    if not inside.exists():
        inside.unlink(missing_ok=True)  # a link to a folder that was removed
        if not can_serve_from(PLACE):
            outside = Path(tempfile.mkdtemp(prefix="outbox-relay-demo-", dir="/var/tmp"))
            outside.chmod(0o755)
            inside.symlink_to(outside)
    return inside.resolve()


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
