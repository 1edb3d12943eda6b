"""`relay run` under a shell, as many images and units start it: SIGTERM must reach it."""

import signal
from pathlib import Path

import pytest

from relay.config.settings import Settings
from relay.testing.servers.process import Process, wait_for
from tests.cli.command import RELAY, Command

START = 60.0  # seconds


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_started_by_exec_it_drains_at_sigterm(settings: Settings, tmp_path: Path, shell: str) -> None:
    relay = Command(
        tmp_path,
        RELAY_DATABASE_URL=settings.database.url.get_secret_value(),
        RELAY_BROKER_URL=settings.broker.url.get_secret_value(),
    )
    log = tmp_path / "relay.log"
    process = Process([shell, "-c", f"exec {RELAY} run"], log=log, environment=relay.environment({}), folder=tmp_path)
    wait_for(lambda: '"relay.ready"' in log.read_text(), "it is ready", START)

    process.stop(signal.SIGTERM)

    assert process.returncode == 0
    assert '"relay.stopped"' in log.read_text()
