"""A replay keeps to its rate; without one it gives way to live rows, and to nothing else."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from relay.config.settings import DatabaseSettings
from relay.jobs.work import FULL, SLICE, Pace, Save
from relay.operate.sent.selection import SentSelection
from relay.operate.sent.session import ReplaySession
from relay.operate.sent.work import BESIDE_LIVE, LivePace, order_replay
from relay.operate.session import session as operator_session
from tests.replay.sent import SentRows
from tests.support.eventually import eventually

INSERT = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload, available_at)
    VALUES ('a', 'e', '1', now() + %s * interval '1 hour')
"""


@pytest.fixture
async def replaying(database: DatabaseSettings) -> AsyncIterator[ReplaySession]:
    with operator_session(database) as tables:
        job = order_replay(tables, SentSelection())
    opened = await ReplaySession.open(database, job, Save("outbox", job))
    yield opened
    await opened.close()


async def test_a_rate_is_not_exceeded() -> None:
    rate = 5000.0
    loop = asyncio.get_running_loop()
    pace = Pace(rate)
    started, given = loop.time(), 0

    while (passed := loop.time() - started) < 0.5:
        given += await pace.room(1000)
        assert given <= rate * (loop.time() - started + SLICE) + 1

    assert given > 0
    assert passed > 0


async def test_it_goes_fast_while_nobody_writes_and_slowly_again_at_the_next_row() -> None:
    pace = LivePace()
    limits = [pace.limit]

    def is_fast() -> bool:
        pace.see(7, is_pending=False)
        return pace.limit == FULL

    limits.append(pace.limit)
    await eventually(is_fast, "it goes fast")
    pace.see(8, is_pending=False)
    limits.append(pace.limit)
    await eventually(is_fast, "it goes fast again")
    pace.see(8, is_pending=True)
    limits.append(pace.limit)

    assert limits == [BESIDE_LIVE] * 4


async def test_without_a_limit_all_may_go_at_once() -> None:
    pace = LivePace()
    pace.limit = FULL

    assert await pace.room(4000) == 4000


async def test_a_row_is_pending_when_it_could_go_out(replaying: ReplaySession, sent: SentRows) -> None:
    seen = [await replaying.look()]
    await sent.connection.execute(INSERT, [24])
    seen.append(await replaying.look())
    await sent.connection.execute(INSERT, [-1])
    seen.append(await replaying.look())
    await sent.connection.execute(INSERT, [None])
    seen.append(await replaying.look())

    assert [is_pending for _, is_pending in seen] == [False, False, True, True]
    assert [last for last, _ in seen][1:] == [1, 2, 3]
