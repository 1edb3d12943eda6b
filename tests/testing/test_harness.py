"""The harness runs handlers without a broker, and tells what became of each message."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.sql import Composed
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from relay.consume import FailurePolicy, Inbox, Message, Overload, Permanent, Retries, WorkPolicy, on
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.apply.transactions import Parameters, Rows
from relay.errors import DatabaseUnavailableError, InvalidPayloadError, MessageError
from relay.outbox import Event, PayloadError, add
from relay.testing import AsyncOutbox, Harness, Outbox, Written

RETRIES = FailurePolicy(retries=Retries(attempts=3, initial=1, maximum=60))
SKIP = FailurePolicy(order="skip", retries=RETRIES.retries)


@dataclass
class Paid:
    amount: int


def paid(amount: int, key: str | None = "42", event_type: str = "InvoicePaid") -> Event:
    return Event("Invoice", key, event_type, {"amount": amount})


@pytest.fixture
def table(database_url: str) -> psycopg.Connection:
    connection = psycopg.connect(database_url, autocommit=True)
    connection.execute("CREATE TABLE payment (position bigint GENERATED ALWAYS AS IDENTITY, amount integer)")
    return connection


class Payments:
    """Handlers whose failures a test plans, and what they did."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.raises: list[Exception] = []
        self.seen: list[Message[Paid]] = []

    def harness(self, failures: FailurePolicy = RETRIES, work: WorkPolicy = WorkPolicy()) -> Harness:  # noqa: B008
        @on("InvoicePaid")
        async def pay(message: Message[Paid], connection: psycopg.AsyncConnection) -> None:
            self.seen.append(message)
            await connection.execute("INSERT INTO payment (amount) VALUES (%s)", [message.payload.amount])
            if message.payload.amount < 0 and self.raises:
                raise self.raises.pop(0)

        return Harness([pay], inbox=Inbox(self.url, "payments"), failures=failures, work=work)

    def amounts(self) -> list[int]:
        with psycopg.connect(self.url) as connection:
            return [amount for (amount,) in connection.execute("SELECT amount FROM payment ORDER BY position")]


@pytest.fixture
def payments(table: psycopg.Connection, database_url: str) -> Payments:
    table.close()
    return Payments(database_url)


def amounts(events: Sequence[Written]) -> list[int]:
    return [event.payload()["amount"] for event in events]


async def test_a_message_that_comes_twice_has_one_effect(payments: Payments) -> None:
    harness = payments.harness()

    first = await harness.deliver(paid(1), paid(2), times=2)
    event = paid(3)
    second, third = await harness.deliver(event), await harness.deliver(event)

    assert (amounts(first.applied), first.duplicates) == ([1, 2], 2)
    assert second.applied == [event]
    assert (second.duplicates, third.applied, third.duplicates) == (0, [], 1)
    assert payments.amounts() == [1, 2, 3]
    first.raise_first()


async def test_a_report_tells_which_handler_was_called_for_which_message(database_url: str) -> None:
    failures = [ZeroDivisionError()]

    @on("InvoicePaid", batch=True)
    async def pay(messages: list[Message], connection: psycopg.AsyncConnection) -> None:
        if failures:
            raise failures.pop()

    @on("*")
    async def take(message: Message, connection: psycopg.AsyncConnection) -> None:
        pass

    work = WorkPolicy(batch_size=10)
    harness = Harness([pay, take], inbox=Inbox(database_url, "payments"), failures=RETRIES, work=work)
    first, second, third = events = [paid(1), paid(2), paid(3, event_type="InvoiceVoided")]

    delivered = await harness.deliver(*events)
    again = await harness.deliver(*events)

    assert delivered.applied_by(pay) == [first, second]
    assert delivered.applied_by(take) == [third]
    calls_of_pay = [each.message_id for each in delivered.calls if each.handler is pay]
    assert calls_of_pay[2:] == [first.message_id, second.message_id]  # one by one, after the list has failed
    assert (again.applied_by(pay), again.calls) == ([], [])


async def test_a_process_that_dies_before_the_acknowledgement_leaves_one_effect(payments: Payments) -> None:
    delivered = await payments.harness().crash_before_ack(paid(1))

    assert (amounts(delivered.applied), delivered.duplicates) == ([1], 1)
    assert payments.amounts() == [1]
    assert [message.redelivered for message in payments.seen] == [False]


async def test_a_handler_gets_the_message_as_a_relay_sends_it(payments: Payments) -> None:
    event = Event("Invoice", "ä/42", "InvoicePaid", {"amount": 1}, headers={"source": "till", "x-event-version": "2"})
    await payments.harness().deliver(event)

    (message,) = payments.seen
    assert (message.message_id, message.type, message.body) == (event.message_id, "InvoicePaid", b'{"amount":1}')
    assert (message.aggregate_type, message.aggregate_id) == ("Invoice", "ä/42")
    assert (message.routing_key, message.content_type) == ("Invoice.InvoicePaid", "application/json")
    assert (message.version, message.headers["source"], message.payload) == ("2", "till", Paid(1))


async def test_a_failed_message_and_those_behind_it_wait_for_their_time(payments: Payments) -> None:
    payments.raises = [ZeroDivisionError("first"), ZeroDivisionError("second")]
    harness = payments.harness()

    now = await harness.deliver(paid(-1), paid(2), paid(3, key="43"))
    soon = await harness.advance(0.4)
    later = await harness.advance(1)
    at_last = await harness.advance(60)

    assert (amounts(now.applied), amounts(now.held), len(now.failed)) == ([3], [-1, 2], 1)
    assert (soon.applied, amounts(soon.held), soon.failed) == ([], [-1, 2], [])
    assert (later.applied, amounts(later.held), str(later.failed[0])) == ([], [-1, 2], "second")
    assert (amounts(at_last.applied), at_last.held, harness.dead) == ([-1, 2], [], [])
    assert payments.amounts() == [3, -1, 2]
    with pytest.raises(ZeroDivisionError, match="first") as raised:
        now.raise_first()
    assert raised.traceback[-1].name == "pay"


@pytest.mark.parametrize("raised", [None, Permanent("given up")], ids=["applied", "dead"])
async def test_those_behind_a_message_that_has_left_follow_in_the_same_call(
    payments: Payments, raised: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = InboxSession.run

    async def slow(session: InboxSession, statement: Composed, *parameters: Parameters) -> Rows:
        if "due_at = now()" in statement.as_string():  # between the end of one message and the next one's turn
            await asyncio.sleep(0.05)
        return await run(session, statement, *parameters)

    monkeypatch.setattr(InboxSession, "run", slow)
    payments.raises = [ZeroDivisionError(), *([raised] if raised else [])]
    harness = payments.harness(FailurePolicy(retries=Retries(attempts=3, initial=1, maximum=60, jitter=0)))
    await harness.deliver(paid(-1), paid(2), paid(3))

    delivered = await harness.advance(1)

    assert (len(delivered.dead), delivered.held) == (1 if raised else 0, [])
    assert amounts(delivered.applied) == ([2, 3] if raised else [-1, 2, 3])


async def test_after_the_last_try_a_message_is_dead_and_its_key_goes_on(payments: Payments) -> None:
    payments.raises = [ZeroDivisionError(str(number)) for number in range(3)]
    harness = payments.harness()
    await harness.deliver(paid(-1), paid(2))

    delivered = await harness.advance(3600)

    (dead,) = delivered.dead
    assert (amounts([dead.event]), dead.reason, dead.attempts, dead.error) == (
        [-1],
        "exhausted",
        3,
        "ZeroDivisionError: 2",
    )
    assert (amounts(delivered.applied), delivered.held, harness.dead) == ([2], [], [dead])


async def test_later_messages_pass_one_that_is_retried_by_the_broker(payments: Payments) -> None:
    payments.raises = [ZeroDivisionError(), ZeroDivisionError()]
    harness = payments.harness(SKIP)

    now = await harness.deliver(paid(-1), paid(2))
    later = await harness.advance(3600)

    assert (amounts(now.applied), now.held, now.dead) == ([2], [], [])
    assert (amounts(later.applied), later.dead, len(later.failed)) == ([-1], [], 1)
    assert payments.amounts() == [2, -1]


async def test_what_can_never_be_applied_is_dead_at_once(payments: Payments) -> None:
    payments.raises = [Permanent("the invoice was cancelled")]
    harness = payments.harness()

    delivered = await harness.deliver(
        paid(-1), paid(1, event_type="InvoiceSeen"), Event("Invoice", "7", "InvoicePaid", {"sum": 1})
    )

    assert {dead.event.key[1]: dead.reason for dead in delivered.dead if dead.event.event_type == "InvoicePaid"} == {
        "42": "permanent",
        "7": "invalid",
    }
    with pytest.raises((Permanent, InvalidPayloadError)):
        delivered.raise_first()
    assert {dead.reason for dead in delivered.dead} == {"permanent", "invalid", "unhandled"}
    assert sorted(map(type, delivered.failed), key=str) == sorted([Permanent, InvalidPayloadError], key=str)
    assert payments.amounts() == []


async def test_a_message_that_no_handler_takes_is_raised(payments: Payments) -> None:
    seen = paid(1, event_type="InvoiceSeen")
    delivered = await payments.harness().deliver(seen)

    with pytest.raises(MessageError) as raised:
        delivered.raise_first()
    words = "type 'InvoiceSeen' has no handler"
    assert str(raised.value) == f"InvoiceSeen {seen.message_id} is unhandled: {words}"


async def test_what_is_no_outbox_and_no_inbox_is_refused(payments: Payments) -> None:
    words = r"Connection is no outbox: write drain\(Outbox\(...\)\)"
    with psycopg.connect(payments.url) as connection, pytest.raises(TypeError, match=words):
        await payments.harness().drain(connection)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inbox is a str: give an Inbox"):
        Harness([], inbox=payments.url)  # type: ignore[arg-type]


async def test_an_overload_leaves_the_message_for_the_next_call(payments: Payments) -> None:
    payments.raises = [Overload("429")]
    harness = payments.harness()

    paused = await harness.deliver(paid(-1))
    again = await harness.advance(1)

    assert (paused.applied, paused.failed, paused.dead) == ([], [], [])
    assert (amounts(paused.waiting), paused.overload and "429" in paused.overload) == ([-1], True)
    assert (amounts(again.applied), payments.seen[-1].redelivered) == ([-1], True)


async def test_events_of_handlers_are_delivered_until_there_are_no_more(payments: Payments) -> None:
    @on("InvoicePaid")
    async def pay(message: Message[Paid], connection: psycopg.AsyncConnection) -> None:
        if message.payload.amount < 3:
            await add(connection, paid(message.payload.amount + 1))

    harness = Harness([pay], inbox=Inbox(payments.url, "payments"))
    async with await psycopg.AsyncConnection.connect(payments.url) as connection:
        await add(connection, paid(1))
        await connection.commit()
        drained = await harness.drain(AsyncOutbox(connection))
        again = await harness.drain(AsyncOutbox(connection))

        assert amounts(drained.applied) == [1, 2, 3]
        assert again.applied == []
        assert amounts(await AsyncOutbox(connection).all("InvoicePaid")) == [1, 2, 3]


async def test_rows_that_are_not_committed_are_not_drained(payments: Payments) -> None:
    harness = payments.harness()
    with psycopg.connect(payments.url) as connection:
        outbox = Outbox(connection)
        add(connection, paid(1))
        with pytest.raises(AssertionError, match=r"^1 row is of a transaction that is not committed \(InvoicePaid\)"):
            await harness.drain(outbox)
        connection.commit()
        with connection.transaction():
            add(connection, paid(2), paid(3))
            with pytest.raises(AssertionError, match=r"^2 rows are of a transaction .* commit before drain"):
                await harness.drain(outbox)
        add(connection, paid(4))
        as_they_are = await harness.deliver(*outbox.all())
        connection.rollback()
        connection.execute("CREATE TABLE other ()")  # the transaction has written, and no row of the outbox

        assert amounts(as_they_are.applied) == [1, 2, 3, 4]
        assert (await harness.drain(outbox)).applied == []


async def test_a_savepoint_that_is_released_is_no_commit(payments: Payments) -> None:
    engine = create_async_engine(payments.url.replace("postgresql://", "postgresql+psycopg://"))
    async with AsyncSession(engine) as session:
        async with session.begin_nested():
            await add(session, paid(1))
        with pytest.raises(AssertionError, match="is not committed"):
            await payments.harness().drain(AsyncOutbox(session))
        await session.commit()
        drained = await payments.harness().drain(AsyncOutbox(session))
    await engine.dispose()

    assert amounts(drained.applied) == [1]


def test_plain_handlers_with_sqlalchemy_work_without_a_loop(payments: Payments) -> None:
    engine = sa.create_engine(payments.url.replace("postgresql://", "postgresql+psycopg://"), pool_size=10)

    @on("InvoicePaid")
    def pay(message: Message[Paid], session: Session) -> None:
        session.execute(sa.text("INSERT INTO payment (amount) VALUES (:amount)"), {"amount": message.payload.amount})

    harness = Harness([pay], inbox=Inbox(sessionmaker(engine), "payments"))
    with Session(engine) as session:
        add(session, paid(1), paid(2))
        session.commit()
        delivered = asyncio.run(harness.drain(Outbox(session)))
    engine.dispose()

    assert amounts(delivered.applied) == [1, 2]
    assert payments.amounts() == [1, 2]


async def test_a_batch_that_fails_is_applied_one_by_one(payments: Payments) -> None:
    payments.raises = [ZeroDivisionError(), ZeroDivisionError()]
    harness = payments.harness(work=WorkPolicy(batch_size=10))

    delivered = await harness.deliver(paid(1), paid(-2), paid(3))

    assert (amounts(delivered.applied), amounts(delivered.held)) == ([1], [-2, 3])
    assert payments.amounts() == [1]


async def test_what_an_overload_has_left_is_drained(payments: Payments) -> None:
    payments.raises = [Overload("429")]
    harness = payments.harness()
    async with await psycopg.AsyncConnection.connect(payments.url) as connection:
        await add(connection, paid(-1), paid(2))
        await connection.commit()
        first = await harness.drain(AsyncOutbox(connection))
        second = await harness.drain(AsyncOutbox(connection))

    assert (first.applied, amounts(second.applied)) == ([], [-1, 2])


async def test_a_call_that_takes_too_long_says_what_is_under_way_and_loses_nothing(payments: Payments) -> None:
    goes_on = asyncio.Event()

    @on("InvoicePaid")
    async def pay(message: Message[Paid], connection: psycopg.AsyncConnection) -> None:
        if message.payload.amount:
            await goes_on.wait()

    harness = Harness([pay], inbox=Inbox(payments.url, "payments"), timeout=5)
    events = [paid(0, key="41"), paid(1), paid(2, key="43")]
    with pytest.raises(TimeoutError) as late:
        await harness.deliver(*events)
    goes_on.set()
    delivered = await harness.deliver()

    assert amounts(delivered.applied) == [1, 2]
    assert str(late.value) == (
        "not settled within 5 s: 2 messages are delivered and not settled, and 1 were applied:"
        f" InvoicePaid {events[1].message_id}, InvoicePaid {events[2].message_id}"
    )


async def test_a_call_that_takes_too_long_says_which_held_message_is_under_way(payments: Payments) -> None:
    tries = 0

    @on("InvoicePaid")
    async def pay(message: Message[Paid], connection: psycopg.AsyncConnection) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ZeroDivisionError
        await asyncio.sleep(600)

    harness = Harness([pay], inbox=Inbox(payments.url, "payments"), failures=RETRIES, timeout=5)
    event = paid(1)
    await harness.deliver(event)
    words = "1 held messages are due, or a handler works on them, and 0 were applied"
    with pytest.raises(TimeoutError, match=f"not settled within 5 s: {words}: InvoicePaid {event.message_id}"):
        await harness.advance(60)


async def test_an_event_that_is_none_takes_no_other_with_it(payments: Payments) -> None:
    harness = payments.harness()
    event = paid(1)
    with pytest.raises(PayloadError):
        await harness.deliver(event, Event("Invoice", "1", "InvoicePaid", {"amount": object()}))

    assert (await harness.deliver(event)).applied == [event]


async def test_a_new_harness_goes_on_with_what_another_has_held(payments: Payments) -> None:
    payments.raises = [ZeroDivisionError(str(number)) for number in range(4)]
    before = await payments.harness().deliver(paid(-1), paid(2))
    after = await payments.harness().advance(3600)

    assert (before.applied, amounts(before.held)) == ([], [-1, 2])
    assert ([amounts([dead.event]) for dead in after.dead], amounts(after.applied)) == ([[-1]], [2])


@pytest.mark.parametrize("failures", [RETRIES, SKIP], ids=["hold", "skip"])
async def test_time_passes_by_advance_alone_and_exactly(payments: Payments, failures: FailurePolicy) -> None:
    payments.raises = [ZeroDivisionError()]
    exact = FailurePolicy(order=failures.order, retries=Retries(attempts=3, initial=0.3, maximum=60, jitter=0))
    harness = payments.harness(exact)
    first = await harness.deliver(paid(-1))
    await asyncio.sleep(0.4)

    assert amounts([*first.held, *first.waiting]) == [-1]
    assert [(await harness.advance(0.1)).applied for _ in range(2)] == [[], []]
    assert amounts((await harness.advance(0.1)).applied) == [-1]


async def test_calls_at_once_and_impossible_times_are_refused(payments: Payments) -> None:
    harness = payments.harness()
    results = await asyncio.gather(harness.deliver(paid(1)), harness.deliver(paid(2)), return_exceptions=True)

    assert [type(result).__name__ for result in results] == ["DeliveryReport", "RuntimeError"]
    for seconds in (-1, float("nan"), float("inf"), 1e15):
        with pytest.raises(ValueError, match="seconds are"):
            await harness.advance(seconds)
    with pytest.raises(ValueError, match="at least 1"):
        await harness.deliver(paid(1), times=0)


async def test_a_row_that_is_not_due_is_drained_when_it_is(payments: Payments) -> None:
    harness = payments.harness()
    later = Event("Invoice", "42", "InvoicePaid", {"amount": 1}, available_at=datetime.now(UTC) + timedelta(hours=1))
    async with await psycopg.AsyncConnection.connect(payments.url) as connection:
        await add(connection, later)
        await connection.commit()
        first = await harness.drain(AsyncOutbox(connection))
        await harness.advance(3600)
        second = await harness.drain(AsyncOutbox(connection))

    assert first.applied == []
    assert second.applied == [later]


async def test_a_database_that_does_not_answer_ends_the_call() -> None:
    with pytest.raises(DatabaseUnavailableError):
        await Payments("postgresql://nobody@127.0.0.1:9/nothing").harness().deliver(paid(1))
