"""`relay run` told to stop while answers of the broker or the database do not come: nothing is lost."""

import asyncio
import signal
from pathlib import Path

import pytest

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.testing.servers.process import Process
from tests.cli.command import RELAY, Command
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Way

ROWS = 20


@pytest.mark.parametrize(
    ("drain_timeout", "signals", "is_database_silent", "code", "last_words"),
    [
        ("0.2", 1, False, 0, ["relay.draining", "drain.timed_out", "relay.stopped"]),
        ("600", 2, False, 130, ["relay.draining", "relay.interrupted"]),
        ("600", 2, True, 130, ["relay.draining", "relay.interrupted"]),
    ],
    ids=["a drain that takes too long", "a second signal", "a second signal beside a silent database"],
)
async def test_what_is_not_confirmed_when_it_stops_stays_pending_and_goes_out_again(
    drain_timeout: str,
    signals: int,
    is_database_silent: bool,
    code: int,
    last_words: list[str],
    *,
    outbox: Outbox,
    queue: Reader,
    broker: BrokerSettings,
    database: DatabaseSettings,
    run_node: RunNode,
    tmp_path: Path,
) -> None:
    async with proxied(broker) as (proxy, far_broker), proxied(database) as (database_proxy, far_database):
        variables = {
            "RELAY_DATABASE_URL": far_database.url.get_secret_value(),
            "RELAY_BROKER_URL": far_broker.url.get_secret_value(),
            "RELAY_DRAIN_TIMEOUT": drain_timeout,
            "RELAY_LOG_FORMAT": "json",
        }
        log = tmp_path / "relay.log"
        relay = Process([RELAY, "run"], log=log, environment=Command(tmp_path).environment(variables))
        try:
            await eventually(lambda: "relay.ready" in log.read_text(), "it is ready", 60)
            proxy.hold(Way.DOWN)
            await outbox.insert_many(ROWS, keys=ROWS)
            await eventually(lambda: has_ready(queue), "the broker has them all", 60)
            if is_database_silent:
                database_proxy.hold(Way.UP)
                database_proxy.hold(Way.DOWN)
            relay.tell(signal.SIGTERM)
            await eventually(lambda: "relay.draining" in log.read_text(), "it drains", 60)
            if signals == 2:
                relay.tell(signal.SIGTERM)
            await eventually(lambda: not relay.is_running(), "it ends", 60)
        finally:
            await asyncio.to_thread(relay.stop, signal.SIGKILL)

    pending = await outbox.ids("pending")
    async with run_node():
        await eventually(outbox.is_empty, "another relay sends them", 60)

    assert relay.returncode == code
    assert [word for word in last_words if f'"{word}"' not in log.read_text()] == []
    assert len(pending) == ROWS
    assert sorted(await queue.ids(2 * ROWS)) == sorted(pending * 2)


async def has_ready(queue: Reader) -> bool:
    declared = await queue.channel.declare_queue(queue.queue.name, passive=True)
    return declared.declaration_result.message_count == ROWS
