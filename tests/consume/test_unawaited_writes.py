"""A handler that does not await its write to the outbox has failed: its message is not applied."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Retries, on
from relay.errors import HandlerResultError
from relay.outbox import Event, NotAwaitedError, add, add_many
from tests.consume.effects import CONSUMER, Queue, Table, apply, running
from tests.support.eventually import eventually

Handler = Callable[[Message, Any], Coroutine[Any, Any, Any]]
EVENT = Event("customer", "17", "MailSent", {})
STARTED: list[asyncio.Task[None]] = []


async def written(table: Table) -> int:
    cursor = await table.connection.execute("SELECT 1 FROM outbox.message WHERE event_type = 'MailSent'")
    return len(await cursor.fetchall())


async def forgets(_: Message, connection: Any) -> None:
    await add(connection, EVENT)
    add_many(connection, [EVENT])


async def starts_a_task(_: Message, connection: Any) -> None:
    STARTED.append(asyncio.create_task(add(connection, EVENT)))


async def forgets_in_a_task(message: Message, connection: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(forgets(message, connection))


@pytest.mark.parametrize("handler", [forgets, starts_a_task, forgets_in_a_task])
async def test_a_write_that_is_not_awaited_fails_the_message(handler: Handler, table: Table, inbox: Inbox) -> None:
    with pytest.raises(NotAwaitedError, match=rf"{__file__}:\d+: no event was written"):
        await apply(inbox, handler)
    while STARTED:
        with pytest.raises(RuntimeError):  # a later transaction does not get it either
            await STARTED.pop()

    assert (await table.inbox_count(), await written(table)) == (0, 0)


async def test_so_it_is_with_a_session_of_sqlalchemy(table: Table, targets: dict[str, Any]) -> None:
    (sessions,) = (each for each in targets.values() if isinstance(each, async_sessionmaker))

    with pytest.raises(NotAwaitedError):
        await apply(Inbox(sessions, CONSUMER), forgets)

    assert (await table.inbox_count(), await written(table)) == (0, 0)


async def returns_it(_: Message, connection: Any) -> Any:
    return add(connection, EVENT)


async def gathers(_: Message, connection: Any) -> None:
    await asyncio.gather(add(connection, EVENT), add(connection, EVENT))
    await asyncio.create_task(add(connection, EVENT))
    add(connection, EVENT).close()


async def test_a_write_that_is_awaited_by_any_means_is_applied(table: Table, inbox: Inbox) -> None:
    assert (await apply(inbox, returns_it)).count == 1
    assert (await apply(inbox, gathers)).count == 1

    assert await written(table) == 4


async def test_the_error_of_the_handler_itself_goes_first(table: Table, inbox: Inbox) -> None:
    kept: list[Any] = []

    async def fails(_: Message, connection: Any) -> None:
        kept.append(add(connection, EVENT))
        raise ValueError

    async def returns_both(_: Message, connection: Any) -> Any:
        return [add(connection, EVENT), add(connection, EVENT)]

    with pytest.raises(ValueError):  # noqa: PT011
        await apply(inbox, fails)
    kept.pop().close()
    with pytest.raises(HandlerResultError):
        await apply(inbox, returns_both)

    assert await written(table) == 0


async def test_a_task_that_outlives_its_handler_hears_of_its_own_write(
    table: Table, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr("sys.unraisablehook", lambda end: seen.append(end.exc_value))
    is_over = asyncio.Event()
    tasks = []

    async def goes_on(connection: Any) -> None:
        await is_over.wait()
        add(connection, EVENT)

    async def leaves_a_task(_: Message, connection: Any) -> None:
        tasks.append(asyncio.create_task(goes_on(connection)))

    assert (await apply(inbox, leaves_a_task)).count == 1
    is_over.set()
    await asyncio.gather(*tasks)
    gc.collect()

    assert [type(each) for each in seen] == [NotAwaitedError]


async def test_the_consumer_makes_a_dead_letter_of_it(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    await queue.send(1, key="a")

    once = FailurePolicy(retries=Retries(attempts=1))
    consumer = Consumer(queue.name, [on("Counted")(forgets)], inbox=inbox, broker=broker, failures=once)
    async with running(consumer):
        await eventually(lambda: consumer.counters.dead_letters.total() == 1, "it is a dead letter")

    assert (await table.inbox_count(), await written(table)) == (0, 0)
