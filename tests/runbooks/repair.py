"""The repair of a runbook: the commands of its block, with the words in capitals replaced."""

import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from relay.testing.servers.process import Process
from tests.prose.pages import MARKDOWN, ROOT
from tests.support.eventually import eventually

RUNBOOKS = ROOT / "docs" / "runbooks"
WITHIN = 240  # seconds, for one that starts Spark


def commands(alert: str) -> str:
    """Return the block of commands of the alert's page."""
    (block,) = (
        token.content for token in MARKDOWN.parse((RUNBOOKS / f"{alert}.md").read_text()) if token.type == "fence"
    )
    return block


@dataclass(frozen=True, slots=True)
class Operator:
    """Runs repairs in a folder, with the servers of a test."""

    folder: Path
    variables: Mapping[str, str]

    async def repair(self, alert: str, **words: object) -> str:
        """Run the repair to its end, and return what it printed.

        Args:
            words: those in capitals, and what stands in their places.
        """
        async with self.repairing(alert, **words) as process:
            await eventually(lambda: not process.is_running(), f"the repair of {alert} ends", within=WITHIN)
            told = self._log(alert).read_text()
            assert process.returncode == 0, told
        return told

    @asynccontextmanager
    async def repairing(self, alert: str, **words: object) -> AsyncIterator[Process]:
        """Run a repair, whose programs end with the block."""
        process = Process(
            ["sh", "-euc", filled(commands(alert), words)],
            log=self._log(alert),
            environment=self.environment,
            folder=self.folder,
        )
        try:
            yield process
        finally:
            process.stop(signal.SIGKILL)

    def add_program(self, name: str, script: str) -> None:
        """Let the commands find a program of this name."""
        program = self.folder / name
        program.write_text(script)
        program.chmod(0o755)

    def _log(self, alert: str) -> Path:
        return self.folder / f"{alert}.log"

    @property
    def environment(self) -> dict[str, str]:
        usual = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
        path = [str(self.folder), str(Path(sys.executable).parent), usual["PATH"]]
        return {**usual, **self.variables, "PATH": os.pathsep.join(path)}


def filled(block: str, words: Mapping[str, object]) -> str:
    for word, value in words.items():
        assert re.search(rf"\b{word}\b", block), f"{word} is not in: {block}"
        block = re.sub(rf"\b{word}\b", str(value), block)
    return block
