"""Looking at dead letters changes nothing, however often it is done, and whatever kind of queue they are in."""

import asyncio
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import BrokerSettings
from relay.consume.classify import FailureReason
from relay.errors import AccessError, BusyError, NotFoundError
from relay.operate.letters import queue as reading
from relay.operate.letters.letter import LetterSelection
from relay.operate.letters.read import list_letters, show_letter
from relay.testing.servers.rabbitmq import RabbitServer
from tests.dead_letters.letters import DEAD, FAILED_AT, QUORUM, Letters
from tests.support.eventually import eventually


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(QUORUM, id="quorum"),
        pytest.param({**QUORUM, "x-delivery-limit": 20}, id="limit-20"),
        pytest.param({**QUORUM, "x-delivery-limit": 3}, id="limit-3"),
        pytest.param({"x-queue-type": "classic"}, id="classic"),
    ],
)
async def test_fifty_looks_lose_nothing_and_change_no_order(
    arguments: Mapping[str, Any], letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAGE", 3)  # so that there are several
    await letters.channel.queue_delete(DEAD)
    await letters.declare(arguments)
    sent = await letters.put_all(8)

    for look in range(50):
        limit = None if look % 2 else 4  # all, or the first pages alone
        await eventually(lambda: letters.has(8), "all letters are back")
        assert await letters.ids(LetterSelection(limit=limit)) == sent[:limit]

    await eventually(lambda: letters.has(8), "all letters are back")
    left = await letters.taken()
    assert [each.message_id for each in left] == sent
    assert [each.body for each in left] == [b"%d" % number for number in range(8)]


async def test_letters_that_are_put_in_anew_are_there_once(letters: Letters) -> None:
    """A channel that is closed forgets the acknowledgements that it has not handed on to the queue."""
    sent = await letters.put_all(2000, size=512)

    for _ in range(reading.MOST_RETURNS + 2):
        assert await letters.ids() == sent
        await eventually(lambda: letters.has(2000), "all letters are back")


async def test_a_letter_tells_what_its_consumer_said(letters: Letters) -> None:
    message_id = await letters.put(7, reason=FailureReason.PERMANENT, failed_at=FAILED_AT + timedelta(seconds=2))

    (letter,) = await letters.read()

    assert (letter.position, letter.message_id, letter.type, letter.key) == (1, message_id, "Counted", "counter/a")
    assert (letter.reason, letter.exception, letter.attempts) == ("permanent", "RuntimeError: not today", 5)
    assert (letter.first_failed_at, letter.last_failed_at) == (FAILED_AT, FAILED_AT + timedelta(seconds=2))
    assert (letter.consumer, letter.exchange, letter.routing_key) == ("projection", "outbox", "counter.Counted")


async def test_what_the_broker_gave_up_tells_why_and_whence(letters: Letters) -> None:
    expiring = {"x-queue-type": "quorum", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
    await letters.channel.queue_declare("short", durable=True, arguments={**expiring, "x-message-ttl": 1})
    await letters.channel.basic_publish(b"1", routing_key="short", properties=Basic.Properties(message_id="late"))
    await eventually(lambda: letters.has(1), "it has expired")

    (before,) = await letters.read()
    for _ in range(reading.MOST_RETURNS + 1):  # until it has been put in again
        await eventually(lambda: letters.has(1), "it is back")
        (after,) = await letters.read()

    assert (before.message_id, before.reason, before.exchange, before.routing_key) == ("late", "expired", "", "short")
    assert before.last_failed_at is not None
    assert after == before


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (LetterSelection(message_ids=frozenset({"two"})), ["two"]),
        (LetterSelection(type="Renamed"), ["three"]),
        (LetterSelection(aggregate_type="counter", aggregate_id="b"), ["two"]),
        (LetterSelection(reason="unhandled"), ["three"]),
        (LetterSelection(consumer="other"), ["two"]),
        (LetterSelection(exception="valueerror: NOT"), ["one"]),
        (LetterSelection(since=FAILED_AT + timedelta(hours=1)), ["two", "three"]),
        (LetterSelection(until=FAILED_AT + timedelta(hours=1)), ["one"]),
        (LetterSelection(since=FAILED_AT, limit=2), ["one", "two"]),
        (LetterSelection(aggregate_id="b", reason="unhandled"), []),
    ],
)
async def test_filters_name_the_letters_that_match_them_all(
    selection: LetterSelection, expected: list[str], letters: Letters
) -> None:
    later = FAILED_AT + timedelta(hours=1)
    await letters.put(message_id="one", exception="ValueError")
    await letters.put(message_id="two", key="b", consumer="other", failed_at=later)
    await letters.put(
        message_id="three", event_type="Renamed", reason=FailureReason.UNHANDLED, failed_at=later + timedelta(hours=1)
    )

    assert await letters.ids(selection) == expected


async def test_a_queue_that_is_not_there_is_named(broker: BrokerSettings) -> None:
    with pytest.raises(NotFoundError, match=r"queue 'other\.dead' does not exist: check its name, and the virtual"):
        await list_letters(broker, "other.dead", LetterSelection())


async def test_a_user_who_may_not_read_is_told_what_he_needs(letters: Letters, rabbitmq: RabbitServer) -> None:
    url = URL(letters.broker.url.get_secret_value())
    name = f"blind_{secrets.token_hex(4)}"
    rabbitmq.call(
        f'rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"{name}">>, <<"tests">>), '
        f'rabbit_auth_backend_internal:set_permissions(<<"{name}">>, <<"{url.path[1:]}">>, '
        '<<"^$">>, <<".*">>, <<"^$">>, <<"tests">>).'
    )
    await letters.put()
    letters.broker = BrokerSettings(url=SecretStr(str(url.with_user(name).with_password(name))))

    with pytest.raises(AccessError, match=r"access to queue 'billing\.dead'.*: give the user of broker\.url"):
        await letters.read()

    rabbitmq.call(f'rabbit_auth_backend_internal:delete_user(<<"{name}">>, <<"tests">>).')


async def test_a_letter_that_is_not_there_is_named(letters: Letters) -> None:
    with pytest.raises(NotFoundError, match=r"has the message id gone: see `relay dead-letters list billing\.dead`"):
        await show_letter(letters.broker, DEAD, "gone")


async def test_a_queue_that_another_consumer_has_for_itself_is_no_empty_queue(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PATIENCE", 0.5)
    await letters.channel.queue_delete(DEAD)
    await letters.declare({**QUORUM, "x-single-active-consumer": True})
    await letters.channel.basic_qos(prefetch_count=1)
    await letters.channel.basic_consume(DEAD, asyncio.Queue[object]().put)
    await letters.put_all(2)

    with pytest.raises(BusyError, match="another consumer has it for itself"):
        await letters.read()


async def test_who_takes_letters_meanwhile_takes_each_once(letters: Letters) -> None:
    """Another consumer of the dead letters: what it has is not ours to list, and what we give back is for it."""
    sent = await letters.put_all(50)
    taken: list[str | None] = []

    async def take(delivered: DeliveredMessage) -> None:
        taken.append(delivered.header.properties.message_id)
        await letters.channel.basic_ack(delivered.delivery_tag or 0)

    looking = [asyncio.create_task(letters.ids()) for _ in range(3)]
    await letters.channel.basic_consume(DEAD, take)
    seen = await asyncio.gather(*looking)

    await eventually(lambda: len(taken) == len(sent), "all have come")
    assert sorted(map(str, taken)) == sorted(sent)
    assert all(set(each) <= set(sent) for each in seen)


async def test_letters_that_cannot_be_put_in_anew_stay(
    letters: Letters, rabbitmq: RabbitServer, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is full. It is told, because a delivery limit might drop them."""
    monkeypatch.setattr(reading, "PAGE", 1)  # what is in our hands does not count for its length
    sent = await letters.put_all(4)
    vhost = broker_url.rpartition("/")[2]
    rabbitmq.ctl("set_policy", "-p", vhost, "full", "dead", '{"max-length": 1}')

    reads = []
    for _ in range(reading.MOST_RETURNS + 2):
        await eventually(lambda: letters.has(4), "they are back")
        reads.append(await list_letters(letters.broker, DEAD, LetterSelection()))

    assert [[each.message_id for each in found] for found, _ in reads] == [sent] * len(reads)
    assert [read.warning for _, read in reads[:3]] == [None] * 3
    assert "it is full" in (reads[-1][1].warning or "")
    await eventually(lambda: letters.has(4), "they are back")
