"""A fault of the relay itself ends it with its traceback: on the next channel it would come again, unseen."""

import asyncio
from collections.abc import Container, Iterable

import pytest

from relay.config.settings import Settings
from relay.engine.node import Node
from relay.engine.row import Row
from relay.engine.send import broker_link, frames
from tests.engine.conftest import Outbox


@pytest.mark.parametrize("kind", [KeyError, RuntimeError])  # the library raises the second when a connection is lost
async def test_a_fault_in_the_wire_ends_the_relay(
    outbox: Outbox, settings: Settings, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    class Faulty(frames.Encoder):
        def encode(self, rows: Iterable[Row], redelivered: Container[int]) -> frames.Encoded:
            raise kind("a fault", rows, redelivered)

    monkeypatch.setattr(broker_link, "Encoder", Faulty)
    row = await outbox.insert("a")

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(Node(settings).run(), 30)

    assert raised.group_contains(broker_link.WireFaultError, match=f"{kind.__name__}: .*a fault")
    assert await outbox.ids("pending") == [row]
