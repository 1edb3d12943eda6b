"""Sent rows, a queue for their copies, and the `relay replay` command between them."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aio_pika
import psycopg
import pytest

from relay.testing.servers.process import Process
from tests.cli.command import RELAY, Command
from tests.replay.sent import Copies, SentRows
from tests.support.eventually import eventually
from tests.support.queues import declare_bound


class Ended(NamedTuple):
    """What a command left."""

    code: int | None
    said: str


class Commands:
    """`relay` with the servers of this test; what is still running at its end is killed."""

    def __init__(self, folder: Path, **variables: str) -> None:
        usual = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
        self.environment = {**usual, **variables}
        self._folder = folder
        self._command = Command(folder, **variables)
        self._started: list[tuple[Process, Path]] = []

    def start(self, *arguments: str, **variables: str) -> Process:
        log = self._folder / f"relay-{len(self._started)}.log"
        process = Process([RELAY, *arguments], log=log, environment={**self.environment, **variables})
        self._started.append((process, log))
        return process

    def said(self, process: Process) -> str:
        """Return all that it has printed until now, events included."""
        return next(log for started, log in self._started if started is process).read_text()

    async def end(self, process: Process, within: float = 60) -> Ended:
        await eventually(lambda: not process.is_running(), "the command ends", within)
        assert "Traceback" not in self.said(process), self.said(process)
        return Ended(process.returncode, self.said(process))

    async def __call__(self, *arguments: str, **variables: str) -> Ended:
        """Run a command to its end."""
        return await self.end(self.start(*arguments, **variables))

    async def ask(self, *arguments: str, **variables: str) -> Ended:
        """Run a command that sends nothing in this process, ten times as fast as in a new one."""
        asked = await asyncio.to_thread(self._command, *arguments, **variables)
        return Ended(asked.code, asked.err + asked.out)

    async def jobs(self) -> list[dict[str, Any]]:
        """Return what `relay jobs list` tells, the newest job first."""
        ended = await self.ask("jobs", "list", "--output", "json")
        jobs: list[dict[str, Any]] = json.loads(ended.said)
        return jobs

    def kill(self) -> None:
        for process, _ in self._started:
            process.stop(signal.SIGKILL)


@pytest.fixture
def relay(tmp_path: Path, database_url: str, broker_url: str) -> Iterator[Commands]:
    commands = Commands(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_BROKER_URL=broker_url, RELAY_LOG_FORMAT="json")
    yield commands
    commands.kill()


@pytest.fixture
async def sent(database_url: str) -> AsyncIterator[SentRows]:
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        yield SentRows(connection)


@pytest.fixture
async def copies(broker_url: str) -> AsyncIterator[Copies]:
    """A queue bound to everything that the default exchange gets."""
    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        copies = Copies(channel, await declare_bound(channel, "copies"))
        await copies.start()
        yield copies
