"""An inbox divided by the days of its messages knows each repeat, makes the days it lacks, and says what it forgot."""

from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Message, WorkPolicy, on, startup
from relay.consume.apply.handlers import collect_handlers
from relay.consume.apply.transactions_factory import open_transactions
from relay.errors import ExpiredMessageError, SchemaError
from relay.retention.kind import INBOX
from relay.retention.rounds import drop_old_days
from tests.consume.effects import Queue, Table, count, delivered, running
from tests.consume.policies import QUICK
from tests.support.eventually import eventually

NOW = datetime.now(UTC).replace(microsecond=0)
DAYS = "SELECT DISTINCT message_day FROM outbox.processed_message ORDER BY 1"
DROP_DAYS = """
    DO $$ DECLARE part regclass; BEGIN
        FOR part IN SELECT inhrelid FROM pg_inherits WHERE inhparent = 'outbox.processed_message'::regclass
            AND inhrelid <> 'outbox.processed_message_undated'::regclass
        LOOP EXECUTE format('DROP TABLE %s', part); END LOOP;
    END $$
"""
PARTITIONS = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox.processed_message'::regclass"
SHAPES = [
    pytest.param(WorkPolicy(concurrency=4), id="four"),
    pytest.param(WorkPolicy(concurrency=2, batch_size=20, pipeline=True), id="pipelined-batches"),
]


@on("Counted")
def count_in_thread(message: Message, connection: psycopg.Connection) -> None:
    connection.execute(
        "INSERT INTO effect (message_id, key, number) VALUES (%s, %s, %s)",
        (message.message_id, message.aggregate_id, message.json()),
    )


async def days_in(table: Table) -> list[date]:
    return [day for (day,) in await (await table.connection.execute(DAYS)).fetchall()]


@pytest.mark.parametrize("work", SHAPES)
async def test_messages_of_any_day_take_effect_once(
    work: WorkPolicy, queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    moments = [None, NOW, NOW - timedelta(days=1), NOW - timedelta(days=390), NOW + timedelta(days=5)]
    for round_ in range(2):
        for number, moment in enumerate(moments):
            await queue.send(number, key=str(number), timestamp=moment, message_id=f"{number}" * 32)
        if round_ == 0:
            await table.connection.execute(DROP_DAYS)

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker, work=work)
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied + consumer.counters.duplicates == 10, "all are settled")

    assert sorted(await table.numbers()) == list(range(5))
    assert (consumer.counters.duplicates, consumer.counters.failed) == (5, 0)
    expected = [date(1970, 1, 1), *(moment.date() for moment in moments if moment)]
    assert await days_in(table) == sorted(expected)


async def test_plain_functions_have_their_days_made_too(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    for number in range(6):
        await queue.send(number, timestamp=NOW - timedelta(days=number))

    consumer = Consumer(
        queue.name, [count_in_thread], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=2, batch_size=4)
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 6, "all are applied")

    assert len(await days_in(table)) == 6


async def test_a_replayed_message_is_known_by_the_day_on_which_it_was_written(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """The relay says created_at as timestamp each time; what it does not say makes no difference."""
    written = NOW - timedelta(days=12)
    message_id = await queue.send(1, timestamp=written)
    await queue.send(1, timestamp=written, message_id=message_id, headers={"x-replay-id": 7})

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with running(consumer):
        await eventually(lambda: consumer.counters.duplicates == 1, "the replay is known")

    assert await table.numbers() == [1]


async def test_what_the_inbox_has_forgotten_is_not_applied_and_named(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    written = NOW - timedelta(days=40)
    message_id = await queue.send(1, timestamp=written)
    consumer = Consumer(
        queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=1, batch_size=10, backoff=QUICK)
    )
    async with running(consumer):
        await eventually(lambda: consumer.counters.applied == 1, "it is applied")
    await drop_old_days(inbox.database, {INBOX: 30})
    await queue.send(2, key="b", timestamp=NOW)
    await queue.send(1, timestamp=written, message_id=message_id)

    consumer = Consumer(
        queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=1, batch_size=10, backoff=QUICK)
    )
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 1, "the other one is applied")
            await eventually(lambda: consumer.counters.dead_letters["expired"] == 1, "the old one is a dead letter")

    assert await table.numbers() == [1, 2]
    assert [letter.message_id for letter in await queue.dead()] == [message_id]
    (error,) = [event["error"] for event in events if event["event"] == "message.dead"]
    day = written.date()
    assert error == (
        f"relay.errors.ExpiredMessageError: Counted {message_id} was written on {day}, and the inbox remembers messages"
        f" only since {day + timedelta(days=1)}: it does not know whether this one was applied"
    )


async def test_days_of_no_clock_are_dead_letters_and_make_no_partitions(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    now = datetime.now(UTC)  # the run may have begun yesterday, of which this database has no day
    ahead = [await queue.send(n, key="a", timestamp=now + timedelta(days=400 * n + 9)) for n in range(3)]
    long_ago = await queue.send(3, key="b", timestamp=now - timedelta(days=2000))
    await queue.send(4, key="c", timestamp=now)
    before = await (await table.connection.execute(PARTITIONS)).fetchone()

    consumer = Consumer(
        queue.name, [count], inbox=inbox, broker=broker, work=WorkPolicy(concurrency=2, batch_size=10, backoff=QUICK)
    )
    with capture_logs() as events:
        async with running(consumer):
            await eventually(lambda: consumer.counters.applied == 1, "the one of today is applied")
            await eventually(lambda: sum(consumer.counters.dead_letters.values()) == 4, "the others are dead letters")

    assert await table.numbers() == [4]
    assert {letter.message_id for letter in await queue.dead()} == {*ahead, long_ago}
    assert (consumer.counters.dead_letters["invalid"], consumer.counters.dead_letters["expired"]) == (3, 1)
    assert any("MisdatedMessageError" in e["error"] for e in events if e["event"] == "message.dead")
    assert await (await table.connection.execute(PARTITIONS)).fetchone() == before


@pytest.mark.parametrize("handler", [count, count_in_thread], ids=["async", "thread"])
async def test_the_error_of_an_expired_message_tells_its_days(handler: Any, table: Table, inbox: Inbox) -> None:
    since = NOW.date() - timedelta(days=30)
    await table.connection.execute("UPDATE outbox.inbox_memory SET since = %s", [since])
    fresh, undated, old = (delivered(1, timestamp=moment) for moment in (NOW, None, NOW - timedelta(days=31)))
    transactions = open_transactions(inbox, collect_handlers([handler]))
    await transactions.open()

    with pytest.raises(ExpiredMessageError) as raised:
        await transactions.apply([fresh, undated, old])
    applied = await transactions.apply([fresh, undated])
    await transactions.close()

    error = raised.value
    assert (error.message_id, error.day, error.remembered_since) == (
        old.message.message_id,
        since - timedelta(days=1),
        since,
    )
    assert (applied.count, await table.numbers()) == (2, [1, 1])


async def test_a_check_of_a_handlers_own_table_is_the_handlers_error(table: Table, inbox: Inbox) -> None:
    await table.connection.execute("ALTER TABLE effect ADD CONSTRAINT small CHECK (number < 10)")
    transactions = open_transactions(inbox, collect_handlers([count]))
    await transactions.open()

    with pytest.raises(psycopg.errors.CheckViolation) as raised:
        await transactions.apply([delivered(11, timestamp=NOW)])
    await transactions.close()

    assert raised.value.diag.constraint_name == "small"
    assert await table.inbox_count() == 0


async def test_days_are_made_ahead_while_it_runs(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "UPKEEP_INTERVAL", 0.05)
    query = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox.processed_message'::regclass"

    async def four_are_there() -> bool:
        row = await (await table.connection.execute(query)).fetchone()
        return row == (4,)  # that of messages without a day, today and the next two

    consumer = Consumer(queue.name, [count], inbox=inbox, broker=broker)
    async with running(consumer):
        for _ in range(2):
            await table.connection.execute(DROP_DAYS)
            await eventually(four_are_there, "they are made")


async def test_days_that_cannot_be_made_are_told_and_messages_of_others_go_on(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    impatient = inbox.database.model_copy(update={"command_timeout": 2.0})
    await queue.send(1, timestamp=NOW + timedelta(days=1))  # it is there, on whichever side of midnight we are
    async with await psycopg.AsyncConnection.connect(inbox.database.url.get_secret_value()) as other:
        await other.execute("SELECT FROM outbox.inbox_memory FOR UPDATE")

        consumer = Consumer(queue.name, [count], inbox=Inbox(impatient, inbox.consumer_name), broker=broker)
        with capture_logs() as events:
            async with running(consumer):
                await eventually(lambda: consumer.counters.applied == 1, "it is applied")
                await eventually(lambda: any(e["event"] == "inbox.days_blocked" for e in events), "it is told")


async def test_a_user_who_may_not_make_days_is_told_at_the_start(
    queue: Queue, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    name = f"role_{uuid4().hex[:12]}"
    url = f"{inbox.database.url.get_secret_value()}?options=-crole%3D{name}"
    as_role = Inbox(inbox.database.model_copy(update={"url": SecretStr(url)}), "projection")
    try:
        await table.connection.execute(f"CREATE ROLE {name}".encode())
        await table.connection.execute(f"GRANT USAGE ON SCHEMA outbox TO {name}".encode())
        await table.connection.execute(f"GRANT SELECT, INSERT ON outbox.processed_message TO {name}".encode())

        with pytest.raises(SchemaError, match="and EXECUTE on"):
            await Consumer(queue.name, [count], inbox=as_role, broker=broker).run(signals=False)
    finally:
        await table.connection.execute(f"DROP OWNED BY {name}".encode())
        await table.connection.execute(f"DROP ROLE {name}".encode())
