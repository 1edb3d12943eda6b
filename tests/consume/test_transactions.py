"""What a handler does to its transaction: nothing is taken for applied that was not committed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest

from relay.consume import Inbox, Message, on
from relay.consume.apply.handlers import collect_handlers
from relay.consume.apply.transactions import Transactions
from relay.consume.apply.transactions_factory import open_transactions
from relay.consume.message import Delivery
from relay.errors import HandlerTransactionError, TransactionEndedError
from tests.consume.effects import Table, delivered

INSERT = "INSERT INTO effect (message_id, number) VALUES (%s, %s)"


@asynccontextmanager
async def opened(inbox: Inbox, handler: Any, **options: Any) -> AsyncIterator[Transactions]:
    transactions = open_transactions(inbox, collect_handlers([handler]), **options)
    await transactions.open()
    try:
        yield transactions
    finally:
        await transactions.close()


def batch() -> list[Delivery]:
    return [delivered(1), delivered(2)]


@on("Counted")
async def swallow(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute(INSERT, (message.message_id, message.json()))
    with suppress(psycopg.errors.DivisionByZero):
        await connection.execute("SELECT 1 / 0")


@on("Counted", batch=True)
async def swallow_pipelined(messages: list[Message], connection: psycopg.AsyncConnection) -> None:
    with suppress(psycopg.errors.DivisionByZero):
        await (await connection.execute("SELECT 1 / 0")).fetchone()


@on("Counted", batch=True)
def swallow_in_thread(messages: list[Message], connection: psycopg.Connection) -> None:
    with suppress(psycopg.errors.DivisionByZero):
        connection.execute("SELECT 1 / 0")


@pytest.mark.parametrize(
    ("handler", "options"),
    [(swallow, {}), (swallow_pipelined, {"pipeline": True}), (swallow_in_thread, {})],
    ids=["async", "pipelined", "thread"],
)
async def test_a_handler_that_goes_on_after_a_failed_statement_has_applied_nothing(
    handler: Any, options: dict[str, Any], table: Table, inbox: Inbox
) -> None:
    async with opened(inbox, handler, **options) as transactions:
        with pytest.raises((HandlerTransactionError, psycopg.errors.InFailedSqlTransaction)):
            await transactions.apply(batch())
        with pytest.raises(HandlerTransactionError, match="run the statement in a savepoint"):
            await transactions.apply(batch()[:1])

    assert (await table.inbox_count(), await table.numbers()) == (0, [])


@on("Counted")
async def in_savepoint(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute(INSERT, (message.message_id, message.json()))
    try:
        async with connection.transaction():
            await connection.execute("SELECT 1 / 0")
    except psycopg.errors.DivisionByZero:
        pass


async def test_a_statement_that_fails_in_a_savepoint_is_the_handlers_own_affair(table: Table, inbox: Inbox) -> None:
    async with opened(inbox, in_savepoint) as transactions:
        assert (await transactions.apply(batch())).count == 2

    assert (await table.inbox_count(), await table.numbers()) == (2, [1, 2])


@on("Counted")
async def commit(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.commit()


@on("Counted")
async def end(message: Message, connection: psycopg.AsyncConnection) -> None:
    await connection.execute("ROLLBACK")


@pytest.mark.parametrize(
    ("handler", "error", "words"),
    [
        (commit, psycopg.ProgrammingError, r"Explicit commit\(\) forbidden"),
        (end, TransactionEndedError, "the handler has ended the transaction"),
    ],
)
async def test_a_handler_that_ends_the_transaction_is_told(
    handler: Any, error: type[Exception], words: str, *, table: Table, inbox: Inbox
) -> None:
    async with opened(inbox, handler) as transactions:
        with pytest.raises(error, match=words):
            await transactions.apply(batch())

        assert not transactions.is_lost
    assert await table.inbox_count() == 0
