"""The benchmark of the peers measures what it says: each drains its table into the queue, and a loss is seen."""

import asyncio
from pathlib import Path

import pytest

from bench.frame import backlog as table
from bench.frame import queue
from bench.frame.backlog import Backlog, Keys
from bench.frame.peer import drain_peer, install
from bench.frame.servers import Servers
from bench.peers import PEERS, WhichSettings
from tests.bench.conftest import Forget

ROWS = 300

pytestmark = [pytest.mark.installs, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def python() -> Path:
    return install()


@pytest.fixture
def backlog(servers: Servers) -> Backlog:
    return table.prepare(servers.database_url, servers.folder, Keys.CDNOW, rows=ROWS + 1)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("which", [WhichSettings.DEFAULT, WhichSettings.TUNED])
def test_a_peer_drains_its_table(
    servers: Servers, backlog: Backlog, python: Path, name: str, which: WhichSettings
) -> None:
    drained = drain_peer(servers, backlog, PEERS[name][which], python, rows=ROWS)

    assert drained["lost"] == 0
    assert min(drained["rate"], drained["sender_cpu"], drained["postgres_cpu"]) > 0
    assert queue.depth(servers.broker_url) == ROWS


@pytest.mark.parametrize("name", PEERS)
async def test_a_message_that_does_not_arrive_is_lost(
    servers: Servers, backlog: Backlog, python: Path, forget_all_but: Forget, name: str
) -> None:
    await forget_all_but(ROWS - 10)

    drained = await asyncio.to_thread(drain_peer, servers, backlog, PEERS[name][WhichSettings.TUNED], python, rows=ROWS)

    assert drained["lost"] == 10
