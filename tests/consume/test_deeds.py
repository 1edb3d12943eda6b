"""Whatever handlers do to their connection: a message is applied, or it has failed, and the others go on."""

from contextlib import suppress
from typing import Any

import psycopg
import pytest

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, FailurePolicy, Inbox, Message, Retries, WorkPolicy, on
from tests.consume.effects import CONSUMER, Queue, Table, running
from tests.consume.policies import QUICK
from tests.support.eventually import eventually

WRITE = "INSERT INTO public.effect (message_id, number) VALUES ('{0.message_id}', {0.payload})"
COMMITS = ["COMMIT; BEGIN", "COMMIT AND CHAIN", "COMMIT"]
ENDS = [
    "ROLLBACK; BEGIN",
    "ROLLBACK AND CHAIN",
    "ROLLBACK",
    "ROLLBACK; BEGIN; SELECT 1 / 0",
    "close",
    "finish",
    "finish, and go on",
    "reset",
    "leave open",
]
OTHERS = [
    "BEGIN",
    "SAVEPOINT one; ROLLBACK TO one",
    "RESET ALL",
    "DISCARD ALL",
    "DEALLOCATE ALL",
    "PREPARE TRANSACTION 'one'",
    "SET ROLE pg_monitor",
    "SET search_path = ''",
    "SET statement_timeout = 1",
    "SET session_replication_role = replica",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
]
LEFT_OPEN: list[Any] = []  # else they are closed with the last reference
DEEDS = [*COMMITS, *ENDS, *OTHERS]


def deed_of(message: Message[int]) -> str | None:
    """Every second message is a good one."""
    number = message.payload
    return DEEDS[number // 2] if number % 2 else None


@on("Counted")
async def by_psycopg(message: Message[int], connection: psycopg.AsyncConnection) -> None:
    write = WRITE.format(message).encode()
    await connection.execute(write)
    match deed_of(message):
        case "close":
            await connection.close()
        case "finish" | "reset" as deed:
            getattr(connection.pgconn, deed)()
        case "finish, and go on":
            cursor = connection.cursor()
            connection.pgconn.finish()
            with suppress(psycopg.Error):
                await cursor.execute(write)
        case "leave open":
            LEFT_OPEN.append(connection.transaction())
            await LEFT_OPEN[-1].__aenter__()
        case str(statement):
            await connection.execute(statement.encode())
    if not connection.closed:
        await connection.execute(write)


@on("Counted")
def by_thread(message: Message[int], connection: psycopg.Connection) -> None:
    write = WRITE.format(message).encode()
    connection.execute(write)
    match deed_of(message):
        case "close":
            connection.close()
        case "finish" | "reset" as deed:
            getattr(connection.pgconn, deed)()
        case "finish, and go on":
            cursor = connection.cursor()
            connection.pgconn.finish()
            with suppress(psycopg.Error):
                cursor.execute(write)
        case "leave open":
            LEFT_OPEN.append(connection.transaction())
            LEFT_OPEN[-1].__enter__()
        case str(statement):
            connection.execute(statement.encode())
    if not connection.closed:
        connection.execute(write)


@on("Counted")
async def by_session(message: Message[int], session: Any) -> None:
    connection = await session.connection()
    write = WRITE.format(message)
    await connection.exec_driver_sql(write)
    match deed_of(message):
        case "close":
            await connection.close()
        case "finish" | "finish, and go on":  # psycopg itself may do so: taken for an outage
            await connection.close()
        case "reset":
            (await connection.get_raw_connection()).driver_connection.pgconn.reset()
        case "leave open":
            LEFT_OPEN.append((await connection.get_raw_connection()).driver_connection.transaction())
            await LEFT_OPEN[-1].__aenter__()
        case str(statement):
            await connection.exec_driver_sql(statement)
    if not connection.closed:
        await connection.exec_driver_sql(write)


@pytest.mark.parametrize(("handler", "batch_size"), [(by_psycopg, 7), (by_thread, 1), (by_session, 1)])
async def test_a_message_is_applied_or_a_dead_letter_and_the_others_go_on(
    handler: Any,
    batch_size: int,
    *,
    queue: Queue,
    table: Table,
    inbox: Inbox,
    targets: dict[str, Any],
    broker: BrokerSettings,
) -> None:
    for number in range(2 * len(DEEDS)):
        await queue.send(number, key=f"key-{number}")

    consumer = Consumer(
        queue.name,
        [handler],
        inbox=Inbox(targets["async session"], CONSUMER) if handler is by_session else inbox,
        broker=broker,
        failures=FailurePolicy(retries=Retries(attempts=2, initial=0.02)),
        work=WorkPolicy(concurrency=1, batch_size=batch_size, backoff=QUICK),
    )
    async with running(consumer):
        await eventually(lambda: settled(consumer) == 2 * len(DEEDS), "each has come to its end")

    dead = {int(letter.body) for letter in await queue.dead()}
    cursor = await table.connection.execute(
        "SELECT number, count(*), bool_and(known.message_id IS NOT NULL) FROM effect"
        " LEFT JOIN outbox.processed_message AS known USING (message_id) GROUP BY number"
    )
    effects = {number: (count, is_known) for number, count, is_known in await cursor.fetchall()}
    applied = set(range(2 * len(DEEDS))) - dead
    assert {number: effects.get(number) for number in applied} == dict.fromkeys(applied, (2, True))
    assert {2 * DEEDS.index(deed) + 1 for deed in (*COMMITS, *ENDS)} <= dead
    if batch_size == 1:  # else a handler's COMMIT makes its neighbours doubtful, too
        assert all(number % 2 for number in dead)
        assert effects.keys() & dead <= {2 * DEEDS.index(deed) + 1 for deed in COMMITS}


def settled(consumer: Consumer) -> int:
    return consumer.counters.applied + sum(consumer.counters.dead_letters.values())
