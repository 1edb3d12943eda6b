"""A command that is told to stop while it starts: the signal counts from the first import on."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from relay.testing.servers.process import Process, wait_for
from tests.cli.command import RELAY, Command

# Sends itself the signal just before it imports that module. Outside of any package of ours, before the first of them.
TOLD_AT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Finder())
sys.argv = ["relay", *{arguments!r}]
from relay.cli import main
sys.exit(main())
"""
AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def relay(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.mark.parametrize("before", [(), AS_PID_1], ids=["outside", "as PID 1"])
@pytest.mark.parametrize("module", ["cyclopts", "psycopg", "relay.cli.run", "relay.engine.node"])
@pytest.mark.parametrize("arguments", [("run",), ("pool", "run")], ids=" ".join)
def test_sigterm_during_the_imports_ends_it_with_0(
    arguments: Sequence[str], module: str, before: Sequence[str], relay: Command
) -> None:
    if arguments == ("pool", "run"):
        module = module.replace("cli.run", "cli.pool").replace("engine.node", "consume.pool.candidate")

    told = _told_at(module, signal.SIGTERM, arguments, before, relay)

    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [("run",), ("pool", "run")], ids=" ".join)
def test_sighup_during_the_imports_does_not_end_it(arguments: Sequence[str], relay: Command) -> None:
    unfit = Command(relay.folder, RELAY_DRAIN_TIMEOUT="soon")

    told = _told_at("cyclopts", signal.SIGHUP, arguments, (), unfit)

    assert told.returncode == 2  # it has gone on, and read its settings
    assert "drain_timeout" in told.stderr


def test_sigterm_ends_a_short_command_with_its_own_code(relay: Command) -> None:
    outside = _told_at("cyclopts", signal.SIGTERM, ("status",), (), relay)
    as_pid_1 = _told_at("cyclopts", signal.SIGTERM, ("status",), AS_PID_1, relay)

    assert (outside.returncode, as_pid_1.returncode) == (-signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.parametrize("arguments", [("run",), ("pool", "run")], ids=" ".join)
def test_sigterm_while_it_waits_for_its_first_connection_ends_it_with_0(
    arguments: Sequence[str], relay: Command, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and never answers
        url = f"postgresql://127.0.0.1:{mute.getsockname()[1]}/x?connect_timeout=60"
        variables = {"RELAY_DATABASE_URL": url, "RELAY_BROKER_URL": "amqp://127.0.0.1:9/"}
        process = Process([RELAY, *arguments], log=tmp_path / "log", environment=relay.environment(variables))
        try:
            mute.settimeout(60)
            connection, _ = mute.accept()
            with connection:
                process.tell(signal.SIGTERM)
                wait_for(lambda: not process.is_running(), "it ends", 30)
                connection.settimeout(30)
                while connection.recv(1000):  # what it had sent
                    pass
        finally:
            process.stop(signal.SIGKILL)

    assert process.returncode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def _told_at(
    module: str, number: int, arguments: Sequence[str], before: Sequence[str], relay: Command
) -> subprocess.CompletedProcess[str]:
    if before and not _may_unshare():
        pytest.skip("only root can have a PID 1 of its own")
    script = TOLD_AT.format(module=module, number=int(number), arguments=list(arguments))
    return subprocess.run(
        [*before, sys.executable, "-c", script],
        cwd=relay.folder,
        env=relay.environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _may_unshare() -> bool:
    return subprocess.run([*AS_PID_1, "true"], check=False, capture_output=True).returncode == 0
