"""A process that gevent has patched is told that asyncio does not work in it, before anything is opened."""

import sys
from types import SimpleNamespace

import pytest

from relay.config.settings import DatabaseSettings
from relay.consume import Consumer, Inbox
from relay.consume.pool import PartitionedConsumer
from relay.errors import MonkeyPatchedError
from relay.publisher import DurablePublisher
from tests.consume.effects import count

NOWHERE = "postgresql://127.0.0.1:1/outbox"
BROKER = "amqp://127.0.0.1:1/"


@pytest.fixture(params=["select", "socket", "threading"])
def patched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    gevent = SimpleNamespace(is_module_patched=lambda name: name == request.param)
    monkeypatch.setitem(sys.modules, "gevent.monkey", gevent)


@pytest.mark.usefixtures("patched")
def test_a_patched_process_is_refused_with_what_to_do() -> None:
    inbox = Inbox(DatabaseSettings.model_validate({"url": NOWHERE}), "billing")

    for refused in (
        lambda: DurablePublisher(NOWHERE, broker=BROKER, name="sensors"),
        lambda: Consumer("billing", [count], inbox=inbox, broker=BROKER),
        lambda: PartitionedConsumer("billing", [count], inbox=inbox, broker=BROKER),
    ):
        with pytest.raises(MonkeyPatchedError, match=r"gevent has patched this process.*--worker-class gthread"):
            refused()


async def test_a_process_that_was_patched_later_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = DurablePublisher(NOWHERE, broker=BROKER, name="sensors")
    monkeypatch.setitem(sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched=lambda _: True))

    with pytest.raises(MonkeyPatchedError):
        async with publisher:
            pass


def test_gevent_without_a_patch_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched=lambda _: False))

    DurablePublisher(NOWHERE, broker=BROKER, name="sensors")
