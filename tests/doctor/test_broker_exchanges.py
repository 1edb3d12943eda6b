"""Each exchange is looked at on every host, and nothing is changed by it."""

import secrets
from collections.abc import Iterator

import aio_pika
import psycopg
import pytest
from aio_pika import ExchangeType
from aio_pika.abc import AbstractChannel
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import Route, Settings
from relay.config.topology import Binding, Exchange, Queue, TopologySettings
from relay.config.topology import ExchangeType as Type
from relay.operate.doctor.finding import Finding, Verdict
from relay.testing.servers.rabbitmq import RabbitServer
from tests.doctor.broker_findings import at, changed, findings_of, verdict
from tests.operate.rows import Rows
from tests.support.queues import declare_bound

QUARANTINE = """
    INSERT INTO outbox.quarantine (exchange, routing_key, reason) VALUES ('outbox', 'customer.Paid', 'NO_ROUTE')
"""
SEND = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, exchange, state, sent_at)
    VALUES ('customer', '1', 'Paid', '{}', %s, 'sent', now())
"""


@pytest.fixture
def limited(rabbitmq: RabbitServer, settings: Settings) -> Iterator[Settings]:
    """Settings of a relay whose user may write to `mine`, read `outbox`, and configure nothing.

    From 4.3 on the broker does not tell whether there is anything of a name to which the user has no right.
    """
    name = f"limited_{secrets.token_hex(4)}"
    url = URL(settings.broker.url.get_secret_value())
    rabbitmq.call(
        f'rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"{name}">>, <<"tests">>), '
        f'rabbit_auth_backend_internal:set_permissions(<<"{name}">>, <<"{url.path[1:]}">>, '
        '<<"^$">>, <<"^mine$">>, <<"^outbox$">>, <<"tests">>).'
    )
    yield at(settings, str(url.with_user(name).with_password(name)))
    rabbitmq.call(f'rabbit_auth_backend_internal:delete_user(<<"{name}">>, <<"tests">>).')


@pytest.fixture
def parted(rabbitmq: RabbitServer, settings: Settings) -> Iterator[tuple[Settings, str]]:
    """Settings of two hosts that do not know the same, and the URL of the second: another virtual host is as good."""
    name = f"parted_{secrets.token_hex(4)}"
    second = rabbitmq.add_vhost(name)
    yield at(settings, settings.broker.url.get_secret_value(), second), second
    rabbitmq.delete_vhost(name)


def routed_to(settings: Settings, exchange: str) -> Settings:
    return settings.model_copy(update={"routes": (Route(exchange=exchange),)})


def listing(settings: Settings, *exchanges: Exchange, bindings: tuple[Binding, ...] = ()) -> Settings:
    return settings.model_copy(update={"topology": TopologySettings(exchanges=exchanges, bindings=bindings)})


async def about(settings: Settings, check: str, exchange: str) -> Finding:
    (finding,) = [each for each in await findings_of(settings, check) if f"exchange {exchange}" in each.words]
    return finding


async def test_the_default_exchange_may_be_missing_where_the_relay_declares_it(settings: Settings) -> None:
    (soon,) = await findings_of(settings, "exchange")
    (never,) = await findings_of(changed(settings, "broker", declare=False), "exchange")

    assert (soon.verdict, soon.words) == (
        Verdict.OK,
        "exchange outbox is missing; `relay run` declares it at its start",
    )
    assert never.verdict is Verdict.FAILED
    assert "NOT_FOUND - no exchange 'outbox'" in never.words


async def test_what_is_listed_may_not_be_missing_while_a_relay_runs(settings: Settings, database_url: str) -> None:
    listed = settings.model_copy(update={"topology": TopologySettings(queues=(Queue(name="mine"),))})
    rows = Rows(database_url)
    with rows.connection:
        rows.node()

    for check in ("exchange", "queue"):
        (finding,) = await findings_of(listed, check)
        assert finding.verdict is Verdict.FAILED
        assert "`relay topology apply`" in (finding.remedy or "")


async def test_what_the_relay_may_not_declare_may_not_be_missing(limited: Settings) -> None:
    listed = limited.model_copy(update={"topology": TopologySettings(queues=(Queue(name="mine"),))})

    for check in ("exchange", "queue"):
        (finding,) = await findings_of(listed, check)
        assert finding.verdict is Verdict.FAILED
        assert "`relay run` may not declare it: ACCESS_REFUSED" in finding.words


async def test_an_exchange_of_a_route_has_to_be_there(settings: Settings, channel: AbstractChannel) -> None:
    mine = routed_to(settings, "mine")
    assert (await about(mine, "exchange", "mine")).verdict is Verdict.FAILED

    await channel.declare_exchange("mine", ExchangeType.DIRECT, durable=True)

    finding = await about(mine, "exchange", "mine")
    assert finding.verdict is Verdict.OK
    assert finding.words.endswith(", durable, of type direct")


@pytest.mark.parametrize(
    ("flag", "words"), [("durable", "but durable is false"), ("auto_delete", "auto_delete is true")]
)
async def test_an_exchange_that_does_not_stay_is_warned_of(
    settings: Settings, channel: AbstractChannel, flag: str, words: str
) -> None:
    await channel.declare_exchange(
        "mine", ExchangeType.FANOUT, durable=flag != "durable", auto_delete=flag == "auto_delete"
    )

    finding = await about(routed_to(settings, "mine"), "exchange", "mine")

    assert finding.verdict is Verdict.WARNING
    assert words in finding.words


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (Exchange(name="mine", type=Type.DIRECT, alternate_exchange="rest"), Verdict.OK),
        (Exchange(name="mine", type=Type.TOPIC, alternate_exchange="rest"), Verdict.FAILED),
        (Exchange(name="mine", type=Type.DIRECT, alternate_exchange="other"), Verdict.FAILED),
        (Exchange(name="mine", type=Type.DIRECT), Verdict.FAILED),
        (Exchange(name="mine", type=Type.DIRECT, durable=False, alternate_exchange="rest"), Verdict.FAILED),
    ],
)
async def test_an_exchange_that_is_listed_is_compared(
    settings: Settings, channel: AbstractChannel, listed: Exchange, expected: Verdict
) -> None:
    await channel.declare_exchange("mine", ExchangeType.DIRECT, durable=True, arguments={"alternate-exchange": "rest"})

    assert (await about(listing(settings, listed), "exchange", "mine")).verdict is expected


async def test_an_exchange_that_only_some_hosts_know_is_named(
    parted: tuple[Settings, str], channel: AbstractChannel
) -> None:
    settings, second = parted
    await channel.declare_exchange("outbox", ExchangeType.TOPIC, durable=True)

    (finding,) = await findings_of(settings, "exchange")

    assert finding.verdict is Verdict.FAILED
    assert f"NOT_FOUND - no exchange 'outbox' in vhost '{URL(second).path[1:]}'" in finding.words
    assert "parted from the others" in finding.remedy


async def test_an_exchange_that_is_not_the_same_everywhere_is_named(
    parted: tuple[Settings, str], channel: AbstractChannel
) -> None:
    settings, second = parted
    await channel.declare_exchange("outbox", ExchangeType.TOPIC, durable=True)
    async with await aio_pika.connect(second) as connection:
        other = await connection.channel()
        await other.declare_exchange("outbox", ExchangeType.TOPIC, durable=False)
        (differs,) = await findings_of(settings, "exchange")
        await other.exchange_delete("outbox")
        await other.declare_exchange("outbox", ExchangeType.TOPIC, durable=True)
        (same,) = await findings_of(settings, "exchange")

    assert differs.verdict is Verdict.FAILED
    assert "is not the same on every host" in differs.words
    assert same.verdict is Verdict.OK


async def test_a_queue_that_is_not_the_same_everywhere_is_named(
    parted: tuple[Settings, str], channel: AbstractChannel
) -> None:
    settings, second = parted
    listed = settings.model_copy(update={"topology": TopologySettings(queues=(Queue(name="mine"),))})
    await channel.declare_queue("mine", durable=True, arguments={"x-queue-type": "quorum"})

    (missing,) = await findings_of(listed, "queue")
    async with await aio_pika.connect(second) as connection:
        await (await connection.channel()).declare_queue("mine", durable=True)
        (differs,) = await findings_of(listed, "queue")

    assert (missing.verdict, differs.verdict) == (Verdict.FAILED, Verdict.FAILED)
    assert "NOT_FOUND - no queue 'mine'" in missing.words
    assert "is not the same on every host" in differs.words


async def test_whether_we_may_publish_is_told_and_nothing_is_published(
    limited: Settings, settings: Settings, channel: AbstractChannel
) -> None:
    queues = [await declare_bound(channel, name, name) for name in ("mine", "outbox")]

    mine = await about(routed_to(limited, "mine"), "write", "mine")
    other = await about(limited, "write", "outbox")
    by_ourselves = await about(settings, "write", "outbox")

    assert (mine.verdict, by_ourselves.verdict) == (Verdict.OK, Verdict.OK)
    assert other.verdict is Verdict.FAILED
    assert "ACCESS_REFUSED" in other.words
    assert "rabbitmqctl set_permissions" in other.remedy
    for queue in queues:
        assert (await queue.declare()).message_count == 0


async def test_what_we_may_not_configure_is_said_to_be_there_and_no_more(
    limited: Settings, channel: AbstractChannel
) -> None:
    await channel.declare_exchange("outbox", ExchangeType.TOPIC, durable=True)

    (finding,) = await findings_of(limited, "exchange")

    assert finding.verdict is Verdict.OK
    assert "what it is like is not told: ACCESS_REFUSED" in finding.words


async def test_nothing_is_known_of_an_exchange_to_which_nothing_was_sent(settings: Settings) -> None:
    (finding,) = await findings_of(settings, "reached")

    assert finding.verdict is Verdict.WARNING
    assert "nothing sent since yesterday is seen" in finding.words


async def test_a_route_in_quarantine_fails_with_its_reason(settings: Settings, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(QUARANTINE)

    (finding,) = await findings_of(settings, "reached")

    assert finding.verdict is Verdict.FAILED
    assert finding.words.startswith("exchange 'outbox', routing key 'customer.Paid' does not work since ")
    assert finding.words.endswith("0 rows wait: NO_ROUTE; see `relay quarantine show 1`")


@pytest.mark.parametrize(("exchange", "expected"), [("outbox", Verdict.OK), (None, Verdict.SKIPPED)])
async def test_what_was_sent_lately_has_reached_a_queue(
    settings: Settings, database_url: str, exchange: str | None, expected: Verdict
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(SEND, [exchange])

    (finding,) = await findings_of(settings, "reached")

    assert finding.verdict is expected
    assert "a queue took a message" in finding.words
    assert ("if the routes were then what they are now" in finding.words) is (exchange is None)


async def test_a_binding_that_is_listed_is_told_as_that(settings: Settings) -> None:
    (finding,) = await findings_of(listing(settings, bindings=(Binding(exchange="outbox", queue="mine"),)), "reached")

    assert finding.verdict is Verdict.SKIPPED
    assert "relay.toml binds mine to it" in finding.words


async def test_without_the_database_it_is_not_known(settings: Settings) -> None:
    nowhere = changed(settings, "database", url=SecretStr("postgresql://a@127.0.0.1:1/none"))

    assert await verdict(nowhere, "reached") is Verdict.SKIPPED
