"""`relay run` as the benches start it: the installed command, told everything by the environment."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.frame.error import BenchmarkError
from bench.frame.notes import NoteReader
from relay.config.settings import Ordering
from relay.testing.servers.process import Process, wait_for

READY_SECONDS = 30.0
DRAIN_SECONDS = 20.0
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class BenchRelay:
    """A relay to start.

    Settings given by RELAY_... variables of the caller's environment hold, so that one can be tried out.

    Attributes:
        node: its name, when several run at once.
        is_noted: it notes each confirm (bench/programs/confirms.py).
        profile: py-spy samples it, and draws its flame graph into that file.
    """

    database_url: str
    broker_url: str
    folder: Path
    ordering: Ordering = Ordering.KEY
    node: str = ""
    is_noted: bool = False
    profile: Path | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.node or 'relay'}.log"

    @property
    def confirms(self) -> NoteReader:
        """Return a reader of the confirms that it notes."""
        return NoteReader(self._confirms_file)

    def start(self) -> Process:
        """Start it; it is not ready yet."""
        environment = {
            **os.environ,
            "RELAY_DATABASE_URL": self.database_url,
            "RELAY_BROKER_URL": self.broker_url,
            "RELAY_ORDERING": self.ordering.value,
            "RELAY_LOG_FORMAT": "json",
            **({"RELAY_NODE": self.node} if self.node else {}),
        }
        self.log.write_text("")
        return Process(self._command(), log=self.log, environment=environment)

    @contextmanager
    def running(self) -> Iterator[Process]:
        """Start it, hand it over once it logged `relay.ready`, and drain it at the end.

        Raises:
            BenchmarkError: it did not exit with 0 when it was told to drain.
        """
        relay = self.start()
        try:
            relay.wait_until(lambda: "relay.ready" in self.log.read_text(), READY_SECONDS)
            sampler = self._sample(relay.pid, self.profile) if self.profile else None
            yield relay
        finally:
            relay.stop(signal.SIGTERM, DRAIN_SECONDS)
        if sampler:
            wait_for(lambda: not sampler.is_running(), "py-spy draws the flame graph", DRAIN_SECONDS)
            if sampler.returncode != 0:
                raise BenchmarkError(f"py-spy drew no flame graph:\n{sampler.log_end()}")
        if relay.returncode != 0:
            raise BenchmarkError(f"the relay did not drain: exit code {relay.returncode}\n{relay.log_end()}")

    @property
    def _confirms_file(self) -> Path:
        return self.folder / f"{self.node or 'relay'}.confirms"

    def _command(self) -> list[str]:
        if self.is_noted:
            return [sys.executable, "-m", "bench.programs.confirms", str(self._confirms_file)]
        return [str(SCRIPTS / "relay"), "run"]

    def _sample(self, pid: int, graph: Path) -> Process:
        """Sample the process, C code included, until it ends."""
        options = ["--native", "--rate", "250", "--pid", str(pid), "--output", os.path.relpath(graph)]
        return Process([SCRIPTS / "py-spy", "record", *options], log=self.folder / "py-spy.log")
