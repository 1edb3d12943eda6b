"""What a member says to the pool's tables, and that it is heard out in time."""

from collections.abc import Awaitable, Callable, Sequence

import psycopg
import pytest
from psycopg.sql import Composed

from relay.config.settings import DatabaseSettings
from relay.consume import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.apply.transactions import Parameters, Rows
from relay.consume.pool.candidate import Candidate
from relay.consume.pool.check_in import CheckIn, HeldPartition
from relay.consume.pool.tables import read_pools
from relay.servers.postgres.database import connect_async
from tests.consume.effects import QUEUE
from tests.support.eventually import eventually

TIMEOUT = 0.4  # seconds


class OpenSession(InboxSession):
    """Commits each statement, but for the last one: its process is frozen before that."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection
        self.is_frozen = False

    async def run(self, statement: Composed, *parameters: Parameters) -> Rows:
        await self._connection.execute("BEGIN")
        cursor = await self._connection.execute(statement, *parameters)
        rows = await cursor.fetchall() if cursor.description else []
        if not self.is_frozen:
            await self._connection.execute("COMMIT")
        return rows


async def check_in(member: CheckIn, held: Sequence[HeldPartition]) -> None:
    await member.check_in(leaving=False, unacknowledged=len(held))


async def release(member: CheckIn, held: Sequence[HeldPartition]) -> None:
    await member.release(held[0].fence)


async def leave(member: CheckIn, held: Sequence[HeldPartition]) -> None:
    assert held
    await member.leave()


@pytest.mark.parametrize("say", [check_in, release, leave])
async def test_a_member_that_is_frozen_before_its_commit_is_removed(
    say: Callable[[CheckIn, Sequence[HeldPartition]], Awaitable[None]],
    inbox: Inbox,
    database: DatabaseSettings,
    master: Candidate,
) -> None:
    async with await connect_async(database) as connection, await connect_async(database) as observer:
        session = OpenSession(connection)
        member = CheckIn(inbox, session, queue=QUEUE, member="frozen", timeout=TIMEOUT)
        held: list[HeldPartition] = []

        async def holds_all() -> bool:
            if not member.is_member:
                await member.join()
            held[:] = await member.check_in(leaving=False, unacknowledged=0)
            return len(held) == 16

        await eventually(holds_all, "it holds all partitions")
        session.is_frozen = True
        await say(member, held)

        async def is_removed() -> bool:
            (pool,) = await read_pools(observer, "outbox")
            return not pool.members and not any(each.assigned.member for each in pool.partitions)

        await eventually(is_removed, "the master has removed it")
        await connection.close()  # the server has ended it
