"""A signal reaches every consumer of a process, and what else of the process waits for it."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.testing.servers.process import Process
from tests.consume.effects import Queue
from tests.consume.process import environment

Start = Callable[[str], Process]


@pytest.fixture
def start(queue: Queue, database: DatabaseSettings, broker: BrokerSettings, tmp_path: Path) -> Start:
    def started(mode: str) -> Process:
        log = tmp_path / "log"
        command = [sys.executable, "-m", "tests.consume.signalled", mode]
        process = Process(command, log=log, environment=environment(database, broker))
        ready = 2 if mode == "two" else 1
        process.wait_until(lambda: log.read_text().count('"consumer.ready"') == ready, 30)
        return process

    return started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("mode", "consumers"), [("alone", 1), ("two", 2)])
def test_all_consumers_of_a_process_stop(mode: str, consumers: int, number: signal.Signals, start: Start) -> None:
    process = start(mode)

    process.stop(number)

    assert process.returncode == 0, process.log_end()
    assert process.log_end().count('"consumer.stopped"') == consumers
    assert "all has ended" in process.log_end()


def test_a_server_that_handles_signals_keeps_them(start: Start) -> None:
    process = start("beside_a_server")

    process.stop(signal.SIGTERM)

    assert process.returncode == 0, process.log_end()
    assert "the server was told" in process.log_end()
    assert '"consumer.stopped"' in process.log_end()


def test_a_consumer_that_takes_signals_lets_the_server_have_them_too(start: Start) -> None:
    process = start("beside_a_server_on_demand")

    process.stop(signal.SIGTERM)

    assert process.returncode == 0, process.log_end()
    assert "the server was told" in process.log_end()
    assert '"consumer.stopped"' in process.log_end()
