"""A relay stays within its memory limit, and sends each message once."""

import os
import signal
import sys
from pathlib import Path

import pytest

from bench.frame.processes import peak_bytes
from relay.runtime.memory import MIB, RESERVED
from relay.testing.servers.process import Process
from tests.engine.conftest import Outbox, Reader
from tests.support.eventually import eventually

RELAY = Path(sys.executable).with_name("relay")
LIMIT = (136 if sys.version_info >= (3, 14) else 128) * MIB


@pytest.mark.parametrize(("rows", "size"), [(1000, 150_000), (6, 16_000_000)])
async def test_it_drains_large_rows_within_its_limit(
    outbox: Outbox, queue: Reader, database_url: str, broker_url: str, tmp_path: Path, rows: int, size: int
) -> None:
    await outbox.insert_many(rows, payload='"' + "x" * (size - 2) + '"')
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": database_url,
        "RELAY_BROKER_URL": broker_url,
        "RELAY_LOG_FORMAT": "json",
    }
    # A real limit of this process alone; that of a control group takes root (tests/container/test_memory.py).
    command = ["prlimit", f"--as={LIMIT + RESERVED}", str(RELAY), "run"]

    relay = Process(command, log=log, environment=environment)
    try:
        await eventually(outbox.is_empty, "all rows are sent", 100)
        peak = peak_bytes(relay.pid)
    finally:
        relay.stop(signal.SIGTERM)

    assert relay.returncode == 0, relay.log_end()
    assert peak <= LIMIT
    assert "degraded" not in log.read_text()  # it has met the limit nowhere
    declared = await queue.channel.declare_queue(queue.queue.name, passive=True)
    assert declared.declaration_result.message_count == rows  # each once
