"""Writing through Spark Connect, where the driver is no Spark driver and knows no JVM."""

import json
import os
import signal
import sys
from pathlib import Path

import psycopg
import pytest

from relay.testing.servers.process import Process, wait_for
from tests.spark.frames import counts, staging_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.jobs
@pytest.mark.timeout(300)
def test_every_way_to_write_and_the_differences_work_through_spark_connect(
    options: dict[str, str], connection: psycopg.Connection, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "tests.spark.connect", json.dumps(options)]
    path = os.pathsep.join(place for place in sys.path if place)
    client = Process(program, log=tmp_path / "client.log", environment={**os.environ, "PYTHONPATH": path}, folder=ROOT)
    try:
        wait_for(lambda: not client.is_running(), "the client has written", 240)
    finally:
        client.stop(signal.SIGKILL)

    assert client.returncode == 0, client.log_end()
    assert counts(connection) == (300, 210, 1 + 6 + 1)
    assert staging_tables(connection) == []
