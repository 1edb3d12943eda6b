"""An application that gevent has patched writes events, and is told that it cannot publish any."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import psycopg
import pytest

from relay.testing.servers.process import Process, free_port, is_listening, wait_for
from tests.installs.conftest import Install

pytestmark = [pytest.mark.installs, pytest.mark.timeout(300)]

PROGRAMS = Path(__file__).parent / "programs"
WITH_GEVENT = ("psycopg[binary]", "gunicorn", "gevent", "packaging")
REQUESTS = 20  # at once, of one worker
WAITING = """
    SELECT count(*) FROM pg_locks
    WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@pytest.fixture
def address(install: Install, database_url: str, broker_url: str, tmp_path: Path) -> Iterator[str]:
    """Where gunicorn serves the application."""
    python = install("newest", "publisher", beside=WITH_GEVENT)
    port = free_port()
    serving = Process(
        [python, "-m", "gunicorn", "--worker-class", "gevent", "--bind", f"127.0.0.1:{port}", "gevent_app:app"],
        log=tmp_path / "gunicorn.log",
        environment={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "RELAY_DATABASE_URL": database_url,
            "RELAY_BROKER_URL": broker_url,
        },
        folder=PROGRAMS,
    )
    try:
        serving.wait_until(lambda: is_listening(port), 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        serving.stop(signal.SIGTERM)


def fetch(url: str) -> str:
    with urlopen(url, timeout=100) as answer:
        return str(answer.read().decode())


def test_a_patched_application_writes_and_is_refused_a_publisher(address: str, database_url: str) -> None:
    with (
        psycopg.connect(database_url, autocommit=True) as connection,
        ThreadPoolExecutor(REQUESTS) as clients,
    ):
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(1)")
            answers = [clients.submit(fetch, f"{address}/write") for _ in range(REQUESTS)]
            wait_for(partial(all_wait, connection), "each request is in its transaction", 60)
        assert [each.result() for each in answers] == ["written"] * REQUESTS
        assert connection.execute("SELECT count(*) FROM outbox.message").fetchone() == (REQUESTS,)

    assert fetch(f"{address}/publish").startswith(
        "MonkeyPatchedError: the durable publisher 'web' runs in asyncio, and gevent has patched this process"
    )


def all_wait(connection: psycopg.Connection) -> bool:
    return connection.execute(WAITING).fetchone() == (REQUESTS,)
