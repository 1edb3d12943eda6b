"""The publisher's database is lost while the broker is there, and in the middle of a commit."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.errors import NotAcceptedError
from relay.publisher import DurablePublisher
from tests.engine.conftest import Outbox, Reader
from tests.publisher.events import NOWHERE, first_of_each, is_direct, measured, publish_all
from tests.support.eventually import eventually
from tests.support.proxy import FaultProxy, Way

COPY_DONE = b"c\0\0\0\x04"  # the client has sent all rows; the server commits before it answers


class Commits(FaultProxy):
    """Between publisher and database; `hold_answer` keeps back what the server says to the next commit."""

    holds_answer = False

    def comes(self, connection: int, way: Way, data: bytes) -> None:  # noqa: ARG002 - the proxy calls it so
        if way is Way.UP and self.holds_answer and COPY_DONE in data:
            self.holds_answer = False
            self.hold(Way.DOWN)


@pytest.fixture
async def commits(database: DatabaseSettings) -> AsyncIterator[Commits]:
    port = conninfo_to_dict(database.url.get_secret_value())["port"]
    async with Commits("127.0.0.1", int(str(port)), amqp=False) as proxy:
        yield proxy


@pytest.fixture
def near(database: DatabaseSettings, commits: Commits) -> DatabaseSettings:
    """The database by way of the proxy."""
    url = make_conninfo(database.url.get_secret_value(), port=commits.port)
    return database.model_copy(update={"url": SecretStr(url), "command_timeout": 5.0})


async def test_while_the_database_is_gone_and_the_broker_is_not_events_go_out_directly(
    near: DatabaseSettings, commits: Commits, broker: BrokerSettings, queue: Reader
) -> None:
    async with DurablePublisher(near, broker=broker, name="sensors") as sensors:
        ids = await publish_all(sensors, [1])
        commits.refusing = True
        commits.cut()

        ids += await publish_all(sensors, range(2, 50))

        assert is_direct(sensors)
        assert (sensors.state.confirmed, sensors.state.buffered) == (49, 0)
    assert first_of_each(await queue.everything()) == {"a": ids}


async def test_a_database_lost_during_a_commit_is_written_to_over_a_new_connection(
    near: DatabaseSettings, commits: Commits, outbox: Outbox
) -> None:
    event = measured(1)
    async with DurablePublisher(near, broker=NOWHERE, name="sensors") as sensors:
        commits.holds_answer = True
        publishing = asyncio.create_task(sensors.publish(event))
        await eventually(lambda: are_pending(outbox, 1), "the server has committed")
        assert not publishing.done()

        commits.cut()
        commits.release(Way.DOWN)
        await publishing

        assert sensors.state.buffered == 1
    assert await message_ids(outbox) == [str(event.message_id)] * 2


async def test_an_unanswered_commit_is_not_accepted_and_the_event_may_come_again(
    near: DatabaseSettings, commits: Commits, outbox: Outbox
) -> None:
    event = measured(1)
    silent = near.model_copy(update={"command_timeout": 2.0})
    async with DurablePublisher(silent, broker=NOWHERE, name="sensors") as sensors:
        commits.holds_answer = True
        with pytest.raises(NotAcceptedError, match="no answer within"):
            await sensors.publish(event)
        assert await message_ids(outbox) == [str(event.message_id)]  # nobody could know

        commits.release(Way.DOWN)
        await sensors.publish(event)

    assert await message_ids(outbox) == [str(event.message_id)] * 2


async def are_pending(outbox: Outbox, count: int) -> bool:
    return len(await outbox.ids("pending")) == count


async def message_ids(outbox: Outbox) -> list[str]:
    cursor = await outbox.connection.execute("SELECT message_id::text FROM outbox.message ORDER BY id")
    return [message_id for (message_id,) in await cursor.fetchall()]
