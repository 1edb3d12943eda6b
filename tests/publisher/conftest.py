"""A publisher with each kind of buffer, and a broker that can be taken from it."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings, RelaySettings, Route
from relay.publisher import DurablePublisher
from tests.engine.conftest import channel, outbox, queue, run_node
from tests.support.proxied import proxied, with_port
from tests.support.proxy import FaultProxy

__all__ = ["channel", "outbox", "queue", "run_node"]  # the engine's fixtures

QUICK = {"backoff_initial": 0.05, "backoff_max": 0.2, "heartbeat_interval": 0.2}

Open = Callable[..., DurablePublisher]


@pytest.fixture(autouse=True)
def patient_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is there but slow is not taken for one that is unreachable."""
    monkeypatch.setattr("relay.publisher.publisher.START_WAIT", 30.0)


@pytest.fixture(params=["table", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseSettings | Path:
    """Where the buffer is."""
    if request.param == "file":
        return tmp_path / "buffer.sqlite"
    database: DatabaseSettings = request.getfixturevalue("database")
    return database


@pytest.fixture
async def proxy(broker: BrokerSettings) -> AsyncIterator[FaultProxy]:
    """What stands between the publisher and the broker."""
    async with proxied(broker) as (proxy, _):
        yield proxy


@pytest.fixture
def publisher(place: DatabaseSettings | Path, broker: BrokerSettings, proxy: FaultProxy) -> Open:
    """`async with publisher(drain_timeout=0.3) as publisher:` opens one behind the proxy, with these relay settings.

    It drains what it buffers itself.
    """

    def make(confirm_timeout: float = 30.0, routes: Sequence[Route] = (), **relay: Any) -> DurablePublisher:
        settings = RelaySettings(**{**QUICK, **relay})
        far = with_port(broker, proxy.port).model_copy(update={"confirm_timeout": confirm_timeout})
        return DurablePublisher(place, broker=far, name="sensors", routes=routes, relay=settings, embedded=True)

    return make
