"""A letter goes once its copy is confirmed and the audit has its row; else it stays, and that is said."""

import asyncio
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from pamqp.commands import Basic

from relay.config.settings import BrokerSettings
from relay.consume import Consumer, Inbox, Permanent
from relay.consume.classify import FailureReason
from relay.errors import NotFoundError, PartlyDoneError, SchemaError
from relay.operate.letters import work as letters_work
from relay.operate.letters.audit import AuditEntry, write_audit
from relay.operate.letters.letter import Letter, LetterSelection
from relay.operate.letters.work import MOST_REFUSED, preview_letters, queues_of
from tests.consume.effects import QUEUE, Stumbling, Table, running
from tests.dead_letters.changes import AUDIT, DISCARD, RETRY, Audit, change
from tests.dead_letters.letters import DEAD, Letters
from tests.support.eventually import eventually
from tests.support.proxied import proxied
from tests.support.proxy import Act, Way


def test_the_queue_may_be_named_by_either_name() -> None:
    assert queues_of("billing") == queues_of("billing.dead") == ("billing", "billing.dead")


async def test_a_letter_sent_back_is_the_message_that_it_was(letters: Letters, audit: Audit) -> None:
    properties = {"priority": 3, "correlation_id": "c", "reply_to": "r", "app_id": "shop"}
    message_id = await letters.put(
        body=b'{"a":  1}', properties=properties, headers={"traceparent": "00-1", "x-retry-attempts": 4, "n": 2**40}
    )

    done = await change(letters, RETRY, audit)

    (message,) = await letters.consumed()
    assert (done.chosen, done.done, done.refused, done.not_found) == (1, 1, [], [])
    assert (message.message_id, message.body, message.type) == (message_id, b'{"a":  1}', "Counted")
    assert (message.priority, message.correlation_id, message.reply_to, message.app_id) == (3, "c", "r", "shop")
    assert {name: value for name, value in message.headers.items() if name != "x-delivery-count"} == {
        "x-aggregate-type": "counter",
        "x-aggregate-id": "a",
        "traceparent": "00-1",
        "n": 2**40,
        "x-original-exchange": "outbox",
        "x-original-routing-key": "counter.Counted",
    }
    assert await letters.waiting() == 0


async def test_a_letter_sent_back_is_tried_anew_and_dies_once_more(
    letters: Letters, audit: Audit, table: Table, inbox: Inbox, broker: BrokerSettings
) -> None:
    """It ends, although what dies again comes back while it runs."""
    message_ids = [await letters.queue.send(number) for number in range(3)]
    handler = Stumbling({0: 2, 1: 1}, Permanent("no"))
    handler.failures[2] = 1
    consumer = Consumer(QUEUE, [handler.handle], inbox=inbox, broker=broker)
    async with running(consumer):
        await eventually(lambda: consumer.counters.dead_letters["permanent"] == 3, "all are dead letters")
        done = await change(letters, RETRY, audit)
        await eventually(lambda: consumer.counters.dead_letters["permanent"] == 4, "one has died again")
        await eventually(lambda: consumer.counters.applied == 2, "the others are applied")

    assert done.done == 3
    assert sorted(await table.numbers()) == [1, 2]
    assert await letters.ids() == message_ids[:1]


async def test_each_letter_has_its_row_in_the_audit(letters: Letters, audit: Audit) -> None:
    await letters.put(message_id="one")
    await letters.put(message_id="two", reason=FailureReason.UNHANDLED, event_type="Renamed")

    await change(letters, RETRY, audit, LetterSelection(message_ids=frozenset({"two"})))
    await eventually(lambda: letters.has(1), "the other one is back")
    await change(letters, DISCARD, audit)

    rows = audit.execute(AUDIT).fetchall()
    told = [(row["command"], row["queue"], row["sent_to"], row["message_id"], row["event_type"]) for row in rows]
    assert told == [
        ("retry", DEAD, QUEUE, "two", "Renamed"),
        ("discard", DEAD, None, "one", "Counted"),
    ]
    assert [(row["reason"], row["key"], row["done_by"], row["why"]) for row in rows] == [
        ("unhandled", "counter/a", "ann@desk", "the tax office is open again"),
        ("exhausted", "counter/a", "ann@desk", "test data"),
    ]
    assert all(row["done_as"] == audit.info.user and row["done_at"] is not None for row in rows)


async def test_a_dry_run_counts_and_changes_nothing(letters: Letters, audit: Audit) -> None:
    sent = await letters.put_all(3)

    done = await preview_letters(letters.broker, RETRY, LetterSelection(limit=2))

    await eventually(lambda: letters.has(3), "all are back")
    assert (done.chosen, done.done) == (2, 2)
    assert await letters.ids() == sent
    assert await letters.queue.ready_count() == 0
    assert audit.execute(AUDIT).fetchall() == []


async def test_a_filter_leaves_the_others_in_their_order(letters: Letters, audit: Audit) -> None:
    for number in range(6):
        await letters.put(number, message_id=str(number), key="ab"[number % 2])

    done = await change(letters, RETRY, audit, LetterSelection(aggregate_id="a", limit=2))

    assert done.done == 2
    assert [message.message_id for message in await letters.consumed()] == ["0", "2"]
    await eventually(lambda: letters.has(4), "the others are back")
    assert await letters.ids() == ["1", "3", "4", "5"]


async def test_many_letters_are_sent_in_their_order(letters: Letters, audit: Audit) -> None:
    sent = await letters.put_all(600)

    done = await change(letters, RETRY, audit)

    assert (done.done, await letters.ids()) == (600, [])
    assert [message.message_id for message in await letters.consumed()] == sent


async def test_an_id_that_is_not_there_is_told(letters: Letters, audit: Audit) -> None:
    await letters.put(message_id="one")

    done = await change(letters, DISCARD, audit, LetterSelection(message_ids=frozenset({"one", "gone"})))

    assert (done.done, done.not_found) == (1, ["gone"])
    assert await letters.waiting() == 0


async def test_what_the_queue_refuses_stays(letters: Letters, audit: Audit) -> None:
    """The queue is full: some go in, and the rest stays with the reason."""
    letters.queue.name = QUEUE
    await letters.channel.queue_delete(QUEUE)
    full: dict[str, Any] = {"x-queue-type": "quorum", "x-max-length": 3, "x-overflow": "reject-publish"}
    await letters.channel.queue_declare(QUEUE, durable=True, arguments=full)
    sent = await letters.put_all(MOST_REFUSED + 20)

    done = await change(letters, RETRY, audit, rate=500.0)

    went = [message.message_id for message in await letters.consumed()]
    refused = dict(done.refused)
    noted = [row["message_id"] for row in audit.execute(AUDIT)]
    assert went
    assert len(went) == done.done
    assert done.is_stopped  # so many were refused that all would be
    assert len(refused) >= MOST_REFUSED
    assert "it is full" in next(iter(refused.values()))
    assert went == noted
    await eventually(lambda: letters.has(len(sent) - len(went)), "the others are back")
    assert await letters.ids() == [each for each in sent if each not in went]


async def test_a_queue_to_send_to_that_is_gone_is_named_before_anything_is_done(letters: Letters, audit: Audit) -> None:
    await letters.put()
    await letters.channel.queue_delete(QUEUE)

    with pytest.raises(NotFoundError, match="queue 'billing' does not exist"):
        await change(letters, RETRY, audit)

    assert await letters.waiting() == 1


async def test_a_letter_that_the_broker_does_not_confirm_stays(letters: Letters, audit: Audit) -> None:
    """It may have arrived, and has: the copy has the same message id, and the inbox lets one have an effect."""
    message_id = await letters.put()
    async with proxied(letters.broker) as (proxy, letters.broker):
        proxy.on_frame(Way.DOWN, Basic.Ack, 1, Act.RESET)
        done = await change(letters, RETRY, audit)

    assert done.done == 0
    assert [(each, "no confirm, so it may have arrived" in why) for each, why in done.refused] == [(message_id, True)]
    assert [message.message_id for message in await letters.consumed()] == [message_id]
    await eventually(lambda: letters.has(1), "it is back")
    assert audit.execute(AUDIT).fetchall() == []


async def test_without_the_audit_nothing_is_sent(letters: Letters, audit: Audit) -> None:
    await letters.put_all(3)
    audit.execute("DROP TABLE outbox.dead_letter_audit")

    with pytest.raises(SchemaError):
        await change(letters, RETRY, audit)

    await eventually(lambda: letters.has(3), "all stay")
    assert await letters.queue.ready_count() == 0


async def test_an_audit_that_fails_later_says_what_is_done(
    letters: Letters, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    await letters.put_all(4)
    write = write_audit

    async def write_and_lose(
        connection: psycopg.AsyncConnection[Any], schema: str, entry: AuditEntry, done: Sequence[Letter]
    ) -> None:
        if len(audit.execute(AUDIT).fetchall()) == 2 and done:
            await connection.close()
        await write(connection, schema, entry, done)

    monkeypatch.setattr(letters_work, "write_audit", write_and_lose)
    words = (
        r"2 letters of billing\.dead are done, 1 more may be and may still be there, and the others stay: .*; `relay"
    )
    with pytest.raises(PartlyDoneError, match=words):
        await change(letters, RETRY, audit, rate=100.0)

    await eventually(lambda: letters.has(2), "the others stay")
    assert [message.message_id for message in await letters.consumed()] == ["id-0", "id-1", "id-2"]


async def test_two_commands_at_once_share_the_letters(letters: Letters, audit: Audit) -> None:
    sent = await letters.put_all(450)

    ends = await asyncio.gather(change(letters, RETRY, audit), change(letters, DISCARD, audit))

    await eventually(lambda: letters.has(450 - sum(end.done for end in ends)), "the rest is back")
    left = await letters.ids()
    noted = [row["message_id"] for row in audit.execute(AUDIT)]
    sent_back = [message.message_id for message in await letters.consumed()]
    assert sorted(map(str, [*left, *noted])) == sorted(sent)
    assert len(sent_back) == ends[0].done
