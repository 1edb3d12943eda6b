"""A primary with a synchronous standby dies, hands over or is cut off; database.url names both servers."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from uuid import UUID

import psycopg
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings, Settings
from relay.engine.node import Node
from relay.operate.schema.migrate import migrate
from tests.faults.evidence import read_ids
from tests.faults.load import relaying, under_load
from tests.faults.relay_sessions import RELAY_SESSIONS, reasons, with_database
from tests.operate.inboxes import Ends, figures
from tests.support.eventually import eventually
from tests.support.pair import Pair

pytestmark = [pytest.mark.drills, pytest.mark.timeout(180)]

DATABASE = "outbox"


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        pair.primary.create_database(DATABASE)
        migrate(DatabaseSettings(url=SecretStr(pair.url(DATABASE))))
        yield pair


async def test_the_primary_is_killed_and_its_standby_promoted_twice(
    settings: Settings, pair: Pair, broker_url: str
) -> None:
    """The primary is killed and its synchronous standby promoted, twice; no message is lost, reordered or repeated."""
    url = pair.url(DATABASE)
    async with under_load(url, broker_url) as load, relaying(with_database(settings, url)):
        for _ in range(2):
            await load.comes_on()
            await asyncio.to_thread(pair.primary.crash)
            await asyncio.to_thread(pair.promote)
            await load.comes_on()
            pair.rejoin()
        await load.comes_on()
        await load.finish()

    assert load.repeats == 0


async def test_the_primary_hands_over_and_back(settings: Settings, pair: Pair, broker_url: str) -> None:
    """The primary hands over to its standby and back; no message is lost, reordered or repeated."""
    url = pair.url(DATABASE)
    async with under_load(url, broker_url) as load, relaying(with_database(settings, url)):
        for _ in range(2):
            await load.comes_on()
            await asyncio.to_thread(pair.primary.stop)  # it ends when its standby has everything
            await asyncio.to_thread(pair.promote)
            pair.rejoin()
        await load.comes_on()
        await load.finish()

    assert load.repeats == 0


async def test_the_old_primary_outlives_the_promotion(settings: Settings, pair: Pair, broker_url: str) -> None:
    """A standby is promoted while its primary still runs; the relay moves to the new one and repeats no message."""
    url = pair.url(DATABASE)
    with capture_logs() as events:
        async with under_load(url, broker_url) as load, relaying(with_database(settings, url, command_timeout=2.0)):
            await load.comes_on()
            await asyncio.to_thread(pair.promote)  # every commit on the old one hangs, and it lets everyone in

            await eventually(lambda: "no answer within 2 s" in reasons(events), "the deadline ends the session")
            await eventually(lambda: has_relays(pair, 1), "it works on the new primary", 40)
            await asyncio.to_thread(pair.other.crash)  # the writers, whose commits hang, learn it now
            await load.comes_on()
            await load.finish()

    assert load.repeats == 0


async def test_a_standby_that_lags_behind_is_promoted(settings: Settings, pair: Pair, broker_url: str) -> None:
    """A lagging standby is promoted and lacks commits; whatever its tables still hold is delivered in order."""
    url = pair.url(DATABASE)
    pair.primary.do_without_standby()
    async with under_load(url, broker_url) as load, relaying(with_database(settings, url)):
        await load.comes_on()
        await asyncio.to_thread(pair.other.stop_following)
        await load.comes_on()
        await asyncio.to_thread(pair.primary.crash)
        await asyncio.to_thread(pair.promote)
        await load.comes_on()
        await load.finish(forgotten=True)


def test_what_a_lagging_standby_lacked_is_named_by_reconcile(pair: Pair, database: DatabaseSettings) -> None:
    """A lagging standby is promoted; `relay reconcile` names each message that was applied and is in no table."""
    ends = Ends(DatabaseSettings(url=SecretStr(pair.url(DATABASE))), database)
    ends.apply(ends.send(5))
    pair.primary.do_without_standby()
    pair.other.stop_following()
    gone = ends.send(3)
    ends.apply(gone)
    before = ends.reconcile()

    pair.primary.crash()
    pair.promote()

    after = ends.reconcile()
    ends.close()
    assert figures(before) == {"billing": (8, 8, 0, 0)}
    assert figures(after) == {"billing": (5, 5, 0, 3)}
    assert {each.message_id for each in after.consumers[0].lost_first} == set(gone)


async def test_two_relays_under_a_split(settings: Settings, pair: Pair, broker_url: str) -> None:
    """A split leaves two primaries; two relays share the new one, and repeat only what neither could mark."""
    url = pair.url(DATABASE)
    async with (
        under_load(url, broker_url) as load,
        two_relaying(with_database(settings, url, command_timeout=2.0)) as nodes,
    ):
        await load.comes_on()
        await asyncio.to_thread(pair.promote)

        await eventually(lambda: has_relays(pair, 2), "both work on the new primary", 40)
        await asyncio.to_thread(pair.other.crash)
        await eventually(lambda: shares(nodes) == [8, 8], "they share the lanes there", 20)
        await load.comes_on()
        await load.finish()

    # What one had sent and could not mark any more may have gone to the other.
    assert load.repeats <= 2 * settings.relay.max_window_rows


async def test_two_relays_when_a_standby_that_lags_behind_is_promoted(
    settings: Settings, pair: Pair, broker_url: str
) -> None:
    """A lagging standby is promoted under two relays; they share its lanes, and what is gone was written last."""
    url = pair.url(DATABASE)
    pair.primary.do_without_standby()
    async with under_load(url, broker_url) as load, two_relaying(with_database(settings, url)) as nodes:
        await load.comes_on()
        known = await message_ids(pair)
        await load.comes_on()
        await asyncio.to_thread(pair.other.stop_following)
        await load.comes_on()
        await asyncio.to_thread(pair.primary.crash)
        await asyncio.to_thread(pair.promote)
        await eventually(lambda: shares(nodes) == [8, 8], "they share the lanes of the new primary", 20)
        await load.comes_on()
        await load.finish(forgotten=True)

    gone = load.delivered - await message_ids(pair)
    assert gone
    assert gone <= load.tried - known


@asynccontextmanager
async def two_relaying(settings: Settings) -> AsyncIterator[tuple[Node, Node]]:
    one, two = (
        settings.model_copy(update={"relay": settings.relay.model_copy(update={"node": name})}) for name in "ab"
    )
    async with relaying(one) as first, relaying(two) as second:
        yield first, second


def shares(nodes: Iterable[Node]) -> list[int]:
    return [node.snapshot().lanes for node in nodes]


async def message_ids(pair: Pair) -> frozenset[UUID]:
    return await read_ids(pair.primary.url(DATABASE), "SELECT message_id FROM outbox.message")


async def has_relays(pair: Pair, number: int) -> bool:
    async with await psycopg.AsyncConnection.connect(pair.primary.url(DATABASE)) as connection:
        return (await connection.execute(f"SELECT {RELAY_SESSIONS}")).rowcount == number
