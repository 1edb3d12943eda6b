"""A process that a drill kills and starts again."""

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relay.testing.servers.process import Process, ServerError
from tests.support.eventually import eventually


@dataclass
class Victim:
    """One program; each start writes its own log."""

    name: str
    command: Sequence[str | Path]
    environment: Mapping[str, str]
    ready: str  # the log event after which it works
    logs: Path
    starts: int = 0
    _process: Process | None = field(default=None, repr=False)

    async def start(self) -> None:
        """Start the process, from the main thread. Returns when it works. Raises ServerError if it ends at once."""
        self.starts += 1
        self._process = process = Process(self.command, log=self.log, environment=self.environment)
        await eventually(lambda: not process.is_running() or self._is_ready(), f"{self.name} starts", 60)
        if not process.is_running():
            raise ServerError(f"{self.name} ended at once with code {process.returncode}\n{process.log_end()}")

    def stop(self, how: signal.Signals) -> int | None:
        """End the process with this signal, and return its exit code."""
        if self._process is None:
            return None
        self._process.stop(how)
        code, self._process = self._process.returncode, None
        return code

    def tell(self, how: signal.Signals) -> None:
        """Send the process a signal, without waiting."""
        assert self._process is not None, f"{self.name} is not running"
        self._process.tell(how)

    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running()

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    def peak_mib(self) -> float:
        """Return the peak of its resident memory."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0

    def _is_ready(self) -> bool:
        return f'"{self.ready}"' in self.log.read_text()

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}-{self.starts}.log"


def relay_victim(database_url: str, broker_url: str, logs: Path) -> Victim:
    """Return a relay on these servers that logs JSON, not started yet."""
    environment = {
        **os.environ,
        "RELAY_DATABASE_URL": database_url,
        "RELAY_BROKER_URL": broker_url,
        "RELAY_LOG_FORMAT": "json",
    }
    return Victim("relay", [Path(sys.executable).parent / "relay", "run"], environment, "relay.ready", logs)
