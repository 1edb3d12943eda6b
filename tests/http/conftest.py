"""A relay that answers, and a client that asks."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from prometheus_client.parser import text_string_to_metric_families

from relay.engine.node import Node
from relay.http.server import answering
from relay.settings import HttpSettings, RelaySettings, Settings
from tests.cli.command import RELAY
from tests.operate.rows import Rows
from tests.support.eventually import eventually
from tests.support.process import Process, free_port

Sample = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: str


@dataclass(frozen=True, slots=True)
class Site:
    """The address of a relay, and the relay if it runs in this process."""

    address: str
    node: Node | None = None

    def ask(self, path: str, **headers: str) -> Answer:
        request = urllib.request.Request(f"http://{self.address}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return Answer(answer.status, answer.headers["Content-Type"], answer.read().decode())
        except HTTPError as refused:
            with refused:
                return Answer(refused.code, refused.headers["Content-Type"], refused.read().decode())

    async def get(self, path: str, **headers: str) -> Answer:
        """Ask from a thread: the relay's event loop may be ours."""
        return await asyncio.to_thread(lambda: self.ask(path, **headers))

    async def is_ready(self) -> bool:
        return (await self.get("/readyz")).status == 200

    async def metrics(self) -> dict[Sample, float]:
        """Scrape, and give each sample's value by its name and labels."""
        answer = await self.get("/metrics")
        assert answer.status == 200, answer.body
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.body)
            for sample in family.samples
        }

    async def value(self, name: str, **labels: str) -> float | None:
        return (await self.metrics()).get((name, tuple(sorted(labels.items()))))


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
        async with answering(chosen, node), asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run())
            yield Site(address, node)
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
    """`start_relay(RELAY_BROKER_URL=...)` starts the installed command with these variables."""
    started: list[Process] = []

    def start(**variables: str) -> RelayProcess:
        address = f"127.0.0.1:{free_port()}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
        environment |= {
            "RELAY_DATABASE_URL": settings.database.url.get_secret_value(),
            "RELAY_BROKER_URL": settings.broker.url.get_secret_value(),
            "RELAY_HTTP__LISTEN": address,
            **variables,
        }
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
