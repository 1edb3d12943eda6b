"""`relay run` as the benchmarks start it: the installed command, told everything by the environment."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.frame.error import BenchmarkError
from relay.config.settings import Ordering
from tests.support.process import Process

READY_SECONDS = 30.0
DRAIN_SECONDS = 20.0


@contextmanager
def running_relay(
    database_url: str,
    broker_url: str,
    ordering: Ordering,
    *,
    log: Path,
    profile: Path | None = None,
    confirms: Path | None = None,
    node: str = "",
) -> Iterator[Process]:
    """Start a relay, hand it over once it logged `relay.ready`, and drain it at the end.

    Settings given by RELAY_... variables of the caller's environment hold, so that one can be tried out.
    With `profile`, it runs under cProfile, which slows it down and writes its figures into that file; with
    `confirms`, it notes each confirm there (bench/programs/confirms.py). Several at once need a `node`, a name, each.

    Raises:
        BenchmarkError: it did not exit with 0 when it was told to drain.
    """
    relay = start_relay(database_url, broker_url, ordering, log=log, profile=profile, confirms=confirms, node=node)
    try:
        relay.wait_until(lambda: "relay.ready" in log.read_text(), READY_SECONDS)
        yield relay
    finally:
        relay.stop(signal.SIGTERM, DRAIN_SECONDS)
    if relay.returncode != 0:
        raise BenchmarkError(f"the relay did not drain: exit code {relay.returncode}\n{relay.log_end()}")


def start_relay(
    database_url: str,
    broker_url: str,
    ordering: Ordering,
    *,
    log: Path,
    profile: Path | None = None,
    confirms: Path | None = None,
    node: str = "",
) -> Process:
    """Start a relay, for which `running_relay` has the words."""
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": database_url,
        "RELAY_BROKER_URL": broker_url,
        "RELAY_ORDERING": ordering.value,
        "RELAY_LOG_FORMAT": "json",
        **({"RELAY_NODE": node} if node else {}),
    }
    log.write_text("")
    return Process(_command(profile, confirms), log=log, environment=environment)


def _command(profile: Path | None, confirms: Path | None) -> list[str]:
    """Give the command line of the relay installed beside this Python."""
    if confirms is not None:
        return [sys.executable, "-m", "bench.programs.confirms", str(confirms)]
    command = [str(Path(sys.executable).parent / "relay"), "run"]
    return command if profile is None else [sys.executable, "-m", "cProfile", "-o", str(profile), *command]
