"""A relay must stop while servers do not answer: it ends in its time all the same, and nothing is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import LiteralString, NamedTuple

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import RelaySettings, Settings
from relay.engine.node import Node
from relay.servers.postgres.database import connect_async
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import FaultProxy, Way

ROWS = 300
# Below the 10 s in which the driver gives a cancelled statement up, and the 30 s of a statement that is not.
SOON = 9.0
QUICK = {"drain_timeout": 0.3, "heartbeat_interval": 0.1, "stall_after": 0.5}


class Ways(NamedTuple):
    """Proxies to both servers, and the settings of a relay that connects through them."""

    database: FaultProxy
    broker: FaultProxy
    settings: Settings

    def silence(self, servers: str) -> None:
        """Hold every answer of these servers, also on new connections."""
        for proxy in self._to(servers):
            proxy.hold(Way.DOWN)

    def end(self, servers: str) -> None:
        """End every connection to these servers, and take no more."""
        for proxy in self._to(servers):
            proxy.refusing = True
            proxy.cut()

    def _to(self, servers: str) -> list[FaultProxy]:
        proxies = {"database": self.database, "broker": self.broker}
        return [proxy for name, proxy in proxies.items() if name in servers]


@asynccontextmanager
async def _ways_to(settings: Settings) -> AsyncIterator[Ways]:
    async with (
        proxied(settings.database) as (to_database, database),
        proxied(settings.broker) as (to_broker, broker),
    ):
        relay = RelaySettings(**{**settings.relay.model_dump(), **QUICK})
        yield Ways(
            to_database, to_broker, settings.model_copy(update={"database": database, "broker": broker, "relay": relay})
        )


@pytest.fixture
async def ways(settings: Settings) -> AsyncIterator[Ways]:
    async with _ways_to(settings) as ways:
        yield ways


async def _stop(node: Node, running: asyncio.Task[None]) -> None:
    node.start_draining()
    await eventually(running.done, "it ends", SOON)
    running.result()


async def delivered_to(queue: Reader) -> set[int]:
    return {int(str(message.headers["x-outbox-id"])) for message in await queue.everything()}


@pytest.mark.parametrize("is_loaded", [False, True], ids=["idle", "loaded"])
@pytest.mark.parametrize("silent", ["database", "broker", "database and broker"])
async def test_a_stop_with_silent_servers_takes_its_time_and_no_more(
    silent: str, *, is_loaded: bool, ways: Ways, outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """A relay must stop while servers are silent; it ends in its time, and another relay sends the rest."""
    node = Node(ways.settings)
    running = asyncio.create_task(node.run())
    await eventually(node.is_ready, "it is ready")
    if is_loaded:
        await outbox.insert_many(ROWS, keys=ROWS)
        await eventually(lambda: node.snapshot().published > 0, "it sends and marks")
    ways.silence(silent)
    if is_loaded:
        await outbox.insert_many(ROWS, keys=ROWS)
    # The silence is noticed: a heartbeat, a read or a mark is under way, or a row waits for its confirm.
    expected = silent.split(maxsplit=1)[0] if is_loaded or "database" in silent else None
    await eventually(lambda: expected is None or bool(node.hindrances()), "it waits for an answer")

    await _stop(node, running)

    written = [*await outbox.ids("pending"), *await outbox.ids("sent")]
    async with run_node():
        await eventually(outbox.is_empty, "another relay sends the rest")
    assert await delivered_to(queue) == set(written)


@pytest.mark.parametrize("gone", ["database", "broker", "database and broker"])
async def test_a_sidecar_that_ends_first_takes_servers_away_from_the_drain(
    gone: str, *, ways: Ways, outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """A relay drains, and what it connects through ends; it ends in its time, and another relay sends the rest."""
    node = Node(ways.settings)
    running = asyncio.create_task(node.run())
    await eventually(node.is_ready, "it is ready")
    ways.broker.hold(Way.UP)
    await outbox.insert_many(ROWS, keys=ROWS)
    written = await outbox.ids("pending")
    await eventually(lambda: node.in_flight > 0, "rows wait for their confirms")

    node.start_draining()
    ways.end(gone)
    await _stop(node, running)

    async with run_node():
        await eventually(outbox.is_empty, "another relay sends the rest")
    assert await delivered_to(queue) == set(written)


@pytest.mark.parametrize("silent", ["database", "broker", "database and broker"])
async def test_a_stop_while_it_connects_ends_it(silent: str, *, ways: Ways, queue: Reader) -> None:
    """A relay must stop while it connects to silent servers; it ends in its time."""
    ways.silence(silent)
    node = Node(ways.settings)
    running = asyncio.create_task(node.run())
    await eventually(lambda: len(node.hindrances()) > 0, "it is not there yet")

    await _stop(node, running)


async def test_a_stop_of_one_that_waits_for_lanes_ends_it(
    ways: Ways, outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """A standby must stop while its database is silent; it ends in its time."""
    standing_by = ways.settings.relay.model_copy(update={"node": "second", "standby": True})
    async with run_node(node="first") as first:
        await eventually(first.is_ready, "the first has the lanes")
        node = Node(ways.settings.model_copy(update={"relay": standing_by}))
        running = asyncio.create_task(node.run())
        await eventually(lambda: "standing by" in node.hindrances().get("lanes", ""), "the second waits for them")
        ways.silence("database")
        await eventually(lambda: "database" in node.hindrances(), "the silence is noticed")

        await _stop(node, running)


async def test_a_session_that_was_lost_is_not_waited_for(ways: Ways, outbox: Outbox, queue: Reader) -> None:
    """A relay must stop with its session lost and confirms missing; it ends in its time, and the rows stay pending."""
    node = Node(ways.settings)
    running = asyncio.create_task(node.run())
    await eventually(node.is_ready, "it is ready")
    ways.silence("broker")
    await outbox.insert_many(ROWS, keys=ROWS)
    await eventually(lambda: node.in_flight > 0, "rows wait for their confirms")
    ways.database.refusing = True
    ways.database.cut()
    await eventually(lambda: "database" in node.hindrances(), "the session is lost")

    await _stop(node, running)

    assert len(await outbox.ids("pending")) == ROWS


async def test_only_a_drain_that_takes_too_long_says_so(settings: Settings, outbox: Outbox, queue: Reader) -> None:
    """A relay stops in order; it logs no timeout of the drain."""
    node = Node(settings)
    running = asyncio.create_task(node.run())
    await outbox.insert_many(ROWS)
    await eventually(outbox.is_empty, "all are sent")

    with capture_logs() as events:
        await _stop(node, running)

    assert "drain.timed_out" not in [event["event"] for event in events]


async def test_an_interrupted_statement_ends_soon_with_a_silent_server(ways: Ways) -> None:
    """A statement is cancelled while the server is silent; it ends within 5 s, and its connection is closed."""
    async with await connect_async(ways.settings.database) as connection:
        ways.silence("database")
        asking = asyncio.create_task(connection.execute("SELECT 1"))
        await asyncio.sleep(0)  # it is sent

        asking.cancel()
        await eventually(asking.done, "it ends", within=5)  # psycopg waits 5 s for the server, and 5 s more

        assert asking.cancelled()
        assert connection.closed


async def test_an_interrupted_statement_is_cancelled_by_a_server_that_answers(settings: Settings) -> None:
    """A statement is cancelled while the server answers; the server cancels it, and the connection stays usable."""
    async with await connect_async(settings.database) as connection:
        asking = asyncio.create_task(connection.execute("SELECT pg_sleep(600)"))
        async with await connect_async(settings.database) as other:
            look = "SELECT FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND datname = current_database()"
            await eventually(lambda: _finds(other, look), "it runs")

            asking.cancel()
            await eventually(asking.done, "it ends", SOON)

        assert await _finds(connection, "SELECT pg_sleep(1.5)")  # for longer than the cancellation may take


async def _finds(connection: psycopg.AsyncConnection, query: LiteralString) -> bool:
    return bool((await connection.execute(query)).rowcount)
