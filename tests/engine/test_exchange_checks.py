"""Once an exchange has closed the channel that all rows share, only rows whose exchange works go out by it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from pydantic import SecretStr

from relay.config.settings import BrokerSettings, KeyPolicy, Ordering
from relay.engine.row import Address
from relay.engine.send import exchange_checks, probe
from relay.engine.send.broker_link import BrokerLink, LinkVerdict
from relay.engine.send.probe import Prober
from relay.engine.send.routes import Router
from relay.servers.rabbitmq.connection import connect
from relay.testing.servers.rabbitmq import RabbitServer
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.support.eventually import eventually

Ask = Callable[..., Awaitable[str]]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[LinkVerdict]:
    """How each channel that all rows share has ended."""
    verdicts: list[LinkVerdict] = []
    publish = BrokerLink._publish

    async def note(*args: object) -> LinkVerdict:
        verdict = await publish(*args)  # type: ignore[arg-type]
        verdicts.append(verdict)
        return verdict

    monkeypatch.setattr(BrokerLink, "_publish", note)
    return verdicts


@pytest.mark.parametrize(
    ("ordering", "key_policy"),
    [(Ordering.KEY, KeyPolicy.HOLD), (Ordering.PIPELINED, KeyPolicy.HOLD), (Ordering.PIPELINED, KeyPolicy.SKIP)],
)
async def test_many_missing_exchanges_close_the_shared_channel_once(
    outbox: Outbox,
    queue: Reader,
    run_node: RunNode,
    closed: list[LinkVerdict],
    ordering: Ordering,
    key_policy: KeyPolicy,
) -> None:
    """Each of them closed it: with a hundred of them one good row arrived 85 times."""
    odd, fine = [], []
    async with outbox.connection.transaction():
        for n in range(60):
            odd.append(await outbox.insert(f"odd-{n}", exchange=f"missing-{n}"))
            fine.append(await outbox.insert(f"fine-{n % 20}"))

    async with run_node(ordering=ordering, key_policy=key_policy) as node:
        await eventually(outbox.is_empty, "nothing pending")
        await eventually(lambda: outbox.are_aside(odd, "no exchange"), "they wait for their exchanges")
        assert node.snapshot().broker_losses == {}
        assert closed == [LinkVerdict.CLOSED]

    arrived = Counter(int(str(message.headers["x-outbox-id"])) for message in await queue.everything())
    assert set(arrived) == set(fine)
    assert max(arrived.values()) <= 2  # what was in flight as the channel closed
    assert await outbox.ids("sent") == fine


@pytest.mark.parametrize(
    ("rights", "address", "reason"),
    [
        (("set_permissions", ".*", "^(?!secret)", ".*"), {"exchange": "secret-{}"}, "access to exchange"),
        # The broker names it `amq.default` in its refusal.
        (
            ("set_permissions", ".*", "^(?!amq.default)", ".*"),
            {"exchange": "", "routing_key": "q-{}"},
            "access to exchange",
        ),
        (("set_topic_permissions", "outbox", "^customer", ".*"), {"routing_key": "secret.{}"}, "access to topic"),
    ],
    ids=["exchanges", "the default exchange", "topics"],
)
async def test_what_is_forbidden_closes_it_once(
    rights: tuple[str, ...],
    address: dict[str, str],
    reason: str,
    outbox: Outbox,
    channel: AbstractChannel,
    queue: Reader,
    run_node: RunNode,
    rabbitmq: RabbitServer,
    broker_url: str,
    closed: list[LinkVerdict],
) -> None:
    odd, fine = [], []
    async with outbox.connection.transaction():
        for n in range(10):
            await channel.declare_exchange(f"secret-{n}", aio_pika.ExchangeType.FANOUT)
            odd.append(await outbox.insert(f"odd-{n}", **{name: text.format(n) for name, text in address.items()}))
            fine.append(await outbox.insert(f"fine-{n}"))
    rabbitmq.ctl(rights[0], "-p", *vhost_and_user(broker_url), *rights[1:])

    async with run_node():
        await eventually(outbox.is_empty, "nothing pending")
        await eventually(lambda: outbox.are_aside(odd, reason), "they wait aside")
        assert closed == [LinkVerdict.CLOSED]

    assert set(await outbox.ids("sent")) == set(fine)


async def test_a_row_without_a_valid_address_keeps_no_other_from_the_answer(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    """It was the first to ask for the exchange of the settings, and nothing was sent there any more."""
    async with run_node():
        await outbox.insert("odd", exchange="missing")
        await eventually(outbox.is_empty, "set aside")
        long = await outbox.insert("long", aggregate_type="a" * 200, event_type="e" * 200)
        fine = [await outbox.insert(f"fine-{n}") for n in range(3)]
        await eventually(outbox.is_empty, "nothing pending")

    assert await outbox.ids("parked") == [long]
    assert await outbox.ids("sent") == fine


async def test_after_a_while_the_relay_asks_for_none(
    outbox: Outbox, queue: Reader, run_node: RunNode, closed: list[LinkVerdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_node():
        await outbox.insert("odd-1", exchange="missing-1")
        await eventually(outbox.is_empty, "set aside")
        monkeypatch.setattr(exchange_checks, "QUIET_AFTER", 0.0)
        fine = await outbox.insert("fine")
        assert await queue.ids(1) == [fine]
        monkeypatch.setattr(exchange_checks, "QUIET_AFTER", 3600.0)
        for n in (2, 3):
            await outbox.insert(f"odd-{n}", exchange=f"missing-{n}")
            await eventually(outbox.is_empty, "set aside")

    assert closed == [LinkVerdict.CLOSED] * 2  # by the first and by the second


async def test_an_exchange_that_is_deleted_meanwhile_closes_it_once_more(
    outbox: Outbox, channel: AbstractChannel, queue: Reader, run_node: RunNode, closed: list[LinkVerdict]
) -> None:
    other = await channel.declare_exchange("other", aio_pika.ExchangeType.FANOUT)
    await queue.queue.bind(other)
    async with run_node():
        odd = await outbox.insert("odd", exchange="missing")
        await eventually(outbox.is_empty, "set aside")
        fine = await outbox.insert("fine", exchange="other")
        assert await queue.ids(1) == [fine]
        await other.delete()
        late = [await outbox.insert(f"late-{n}", exchange="other") for n in range(2)]
        await eventually(outbox.is_empty, "set aside")
        await eventually(lambda: outbox.are_aside([odd, *late], "no exchange"), "they wait aside")
        assert closed == [LinkVerdict.CLOSED] * 2


def vhost_and_user(broker_url: str) -> tuple[str, str]:
    return broker_url.rpartition("/")[2], broker_url.partition("//")[2].partition(":")[0]


@pytest.fixture
async def ask(broker_url: str) -> Ask:
    """Return the broker's refusal of an exchange and a routing key."""

    async def answer(exchange: str, routing_key: str = "k") -> str:
        connection = await connect(BrokerSettings(url=SecretStr(broker_url)), "test")
        prober = Prober(connection, None, None, Router((), "outbox"))  # type: ignore[arg-type]
        try:
            answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            address = Address(exchange.encode(), routing_key.encode())
            prober.ask(address, answered.set_result, at_once=False)
            return await answered
        finally:
            await prober.close()
            await connection.hang_up()

    return answer


async def test_a_question_reaches_no_queue(queue: Reader, ask: Ask) -> None:
    await queue.queue.bind("amq.fanout")

    assert await ask("outbox", "customer.InvoiceIssued") == ""
    assert await ask("amq.fanout") == ""
    assert await ask("", queue.queue.name) == ""
    assert "no exchange 'missing'" in await ask("missing")

    assert await queue.everything() == []


@pytest.mark.parametrize("name", ["missingé", "a=b", "a b\n", "e" * 200, "e" * 255])
async def test_every_name_that_a_row_may_have_can_be_asked_for(name: str, ask: Ask) -> None:
    """The library takes some letters only, and 127 of them."""
    assert "NOT_FOUND - no exchange '" in await ask(name, "k" * 255)


async def test_a_broker_that_does_not_answer_in_time_refuses_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ANSWER_WITHIN", 0.0)

    assert await ask("missing") == ""
