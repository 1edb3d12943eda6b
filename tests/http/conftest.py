"""A relay that answers, and a client that asks."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.config.settings import HttpSettings, RelaySettings, Settings
from relay.engine.node import Node
from relay.probes.node import answering_for
from relay.testing.servers.process import Process, free_port
from tests.cli.command import RELAY
from tests.http.site import Site
from tests.operate.rows import Rows
from tests.support.eventually import eventually

RunSite = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture
def run_site(settings: Settings) -> RunSite:
    """`async with run_site(max_attempts=1) as site:` runs a node that answers, and drains it."""

    @asynccontextmanager
    async def run(base: Settings = settings, **relay: Any) -> AsyncIterator[Site]:
        address = f"127.0.0.1:{free_port()}"
        told = {**base.relay.model_dump(), "backoff_initial": 0.05, "heartbeat_interval": 0.2, **relay}
        chosen = base.model_copy(update={"relay": RelaySettings(**told), "http": HttpSettings(listen=address)})
        node = Node(chosen)
        async with answering_for(node, chosen), asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run())
            yield Site(address)
            node.start_draining()

    return run


@dataclass(frozen=True, slots=True)
class RelayProcess:
    """`relay run` on its own."""

    process: Process
    log: Path
    site: Site

    async def wait_for_log(self, words: str) -> None:
        await eventually(lambda: words in self.log.read_text() or not self.process.is_running(), words, 30)
        assert words in self.log.read_text(), self.log.read_text()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    async def wait_for_end(self) -> int | None:
        await eventually(lambda: not self.process.is_running(), "it ends", 30)
        return self.process.returncode


StartRelay = Callable[..., RelayProcess]


@pytest.fixture
def start_relay(tmp_path: Path, settings: Settings) -> Iterator[StartRelay]:
    """`start_relay(RELAY_BROKER_URL=...)` starts the installed command with these variables, and without some."""
    started: list[Process] = []

    def start(*, without: Sequence[str] = (), **variables: str) -> RelayProcess:
        address = f"127.0.0.1:{free_port()}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
        environment |= {
            "RELAY_DATABASE_URL": settings.database.url.get_secret_value(),
            "RELAY_BROKER_URL": settings.broker.url.get_secret_value(),
            "RELAY_HTTP_LISTEN": address,
            **variables,
        }
        environment = {name: value for name, value in environment.items() if name not in without}
        log = tmp_path / f"relay-{len(started)}.log"
        process = Process([RELAY, "run"], log=log, environment=environment, folder=tmp_path)
        started.append(process)
        return RelayProcess(process, log, Site(address))

    yield start
    for process in started:
        process.stop(signal.SIGKILL)


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """Rows of this test's database."""
    written = Rows(database_url)
    with written.connection:
        yield written
