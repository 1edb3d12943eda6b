"""Each address of a name is a separate host; names are resolved again, and the resolver may fail or hang."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from pydantic import SecretStr
from yarl import URL

from relay.config.settings import BrokerSettings
from relay.errors import BrokerUnavailableError
from relay.servers.rabbitmq import hosts as broker_hosts
from relay.servers.rabbitmq.connection import connect
from relay.servers.rabbitmq.hosts import BrokerHost, addresses, in_turn, is_listed
from relay.testing.servers.process import free_port
from tests.support.names import Names, resolving
from tests.support.proxy import FaultProxy

NAME = "rabbit.test"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"
ENOUGH, BRIEF = 5.0, 0.2  # seconds for a name that is resolved, and for one that is not


@pytest.fixture
def names() -> Iterator[Names]:
    with resolving() as names:
        names[NAME] = [FIRST, SECOND]
        yield names


@pytest.fixture
async def proxies(broker_url: str) -> AsyncIterator[dict[str, FaultProxy]]:
    """The broker, on one port of two addresses."""
    url, port = URL(broker_url), free_port()
    async with AsyncExitStack() as stack:
        yield {
            address: await stack.enter_async_context(FaultProxy(str(url.host), url.port or 0, at=(address, port)))
            for address in (FIRST, SECOND)
        }


@pytest.fixture
def named(broker_url: str, proxies: dict[str, FaultProxy], names: Names) -> BrokerSettings:
    """The broker by the name of both addresses."""
    return settings(URL(broker_url).with_host(NAME).with_port(proxies[FIRST].port))


def settings(*urls: URL, timeout: float = 5.0) -> BrokerSettings:
    return BrokerSettings(url=SecretStr(",".join(map(str, urls))), connect_timeout=timeout)


async def address_of(broker: BrokerSettings) -> str:
    connection = await connect(broker, "test")
    await connection.close()
    return connection.host.address


async def order(*urls: URL, after: BrokerHost | None = None) -> list[str]:
    return [str(each) async for each in in_turn(urls, after=after, within=ENOUGH)]


async def test_an_address_that_does_not_let_us_in_is_followed_by_the_next(
    named: BrokerSettings, proxies: dict[str, FaultProxy]
) -> None:
    first = await address_of(named)
    proxies[first].refusing = True

    assert {first, await address_of(named)} == {FIRST, SECOND}


async def test_each_address_that_does_not_let_us_in_is_named_with_its_reason(names: Names) -> None:
    port = free_port()

    with pytest.raises(BrokerUnavailableError) as caught:
        await connect(settings(URL(f"amqp://{NAME}:{port}/")), "test")

    for address in (FIRST, SECOND):
        assert re.search(rf"{NAME}:{port} \({address}\): .*Connect call failed", str(caught.value))


async def test_the_lost_address_is_tried_last(named: BrokerSettings, proxies: dict[str, FaultProxy]) -> None:
    lost = await connect(named, "test")
    await lost.close()
    other = await connect(named, "test", after=lost)
    await other.close()

    assert {lost.host.address, other.host.address} == {FIRST, SECOND}
    proxies[other.host.address].refusing = True
    again = await connect(named, "test", after=lost)
    await again.close()
    assert again.host == lost.host


async def test_a_name_is_resolved_anew_for_each_connection(
    named: BrokerSettings, names: Names, proxies: dict[str, FaultProxy]
) -> None:
    names[NAME] = [FIRST]
    assert await address_of(named) == FIRST

    names[NAME] = [SECOND]

    assert await address_of(named) == SECOND


async def test_a_name_that_nobody_knows_is_one_reason_among_others(
    names: Names, broker_url: str, proxies: dict[str, FaultProxy]
) -> None:
    names["gone.test"] = []
    gone, there = URL("amqp://gone.test/"), URL(broker_url)

    assert await address_of(settings(gone, there)) == there.host
    with pytest.raises(BrokerUnavailableError, match=r"gone\.test:5672: Name or service not known; 127\.0\.0\.1:"):
        await connect(settings(gone, there.with_port(free_port())), "test")


async def test_a_name_that_nobody_could_ask_for_is_one_too() -> None:
    with pytest.raises(BrokerUnavailableError, match="^" + "x" * 70):
        await connect(settings(URL(f"amqp://{'x' * 70}.test/")), "test")


async def test_a_resolver_that_hangs_delays_neither_other_hosts_nor_the_loop_nor_its_end(
    names: Names, broker_url: str
) -> None:
    names.answering.clear()
    hanging = settings(URL(f"amqp://{NAME}/"), URL(broker_url), timeout=5.0)

    try:
        # In a separate loop: it ends, whatever the resolver does.
        address = await asyncio.wait_for(asyncio.to_thread(asyncio.run, address_of(hanging)), 60)

        assert (address, names.asked) == (URL(broker_url).host, 1)
        with pytest.raises(BrokerUnavailableError, match=f"{NAME}:5672: the name is not resolved within 0.2 s"):
            await addresses(URL(f"amqp://{NAME}/"), BRIEF)
    finally:
        names.answering.set()


async def test_ipv6_is_named_as_in_a_url(names: Names, broker_url: str) -> None:
    url = URL(broker_url)
    names["six.test"] = ["::1"]
    async with FaultProxy(str(url.host), url.port or 0, at=("::1", 0)) as proxy:
        for host in ("six.test", "::1"):
            connection = await connect(settings(url.with_host(host).with_port(proxy.port)), "test")
            await connection.close()
            assert connection.host.address == "::1"

    assert await order(URL("amqp://six.test"), URL("amqp://[::1]")) == ["six.test:5672 (::1)", "[::1]:5672"]


async def test_the_order_of_the_addresses_is_a_process_own_whatever_that_of_dns_is(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [f"10.0.0.{n}" for n in range(10)]
    orders = set()
    for process in range(5):
        monkeypatch.setattr(broker_hosts, "SALT", bytes([process]))
        names[NAME] = many
        found = await order(URL(f"amqp://{NAME}"))
        names[NAME] = random.sample(many, len(many))
        assert await order(URL(f"amqp://{NAME}")) == found
        orders.add(tuple(found))

    assert len(orders) > 1


async def test_a_round_begins_behind_the_lost_address_and_ends_with_it(names: Names) -> None:
    names[NAME] = [f"10.0.0.{n}" for n in range(3)]
    a, b, c = (URL(f"amqp://{host}") for host in ("10.1.0.1", NAME, "10.1.0.2"))
    first, second, third = await addresses(b, ENOUGH)

    assert await order(a, b, c) == ["10.1.0.1:5672", str(first), str(second), str(third), "10.1.0.2:5672"]
    assert await order(a, b, c, after=second) == [
        str(third),
        "10.1.0.2:5672",
        "10.1.0.1:5672",
        str(first),
        str(second),
    ]
    names[NAME].remove(second.address)
    assert await order(a, b, after=second) == [str(first), str(third), "10.1.0.1:5672"]
    assert await order(a, c, after=second) == ["10.1.0.1:5672", "10.1.0.2:5672"]


@pytest.mark.parametrize(
    ("listed", "answers"),
    [
        ("amqp://u:new@rabbit.test/v", True),
        ("amqp://u:p@rabbit.test/v?auth=external", False),
        ("amqp://u:p@elsewhere.test/v,amqp://u:p@rabbit.test:5672/v", True),
        ("amqp://u:p@elsewhere.test/v", False),
        ("amqp://u:p@rabbit.test:5673/v", False),
        ("amqps://u:p@rabbit.test:5672/v", False),
        ("amqp://other:p@rabbit.test/v", False),
        ("amqp://u:p@rabbit.test/other", False),
    ],
)
async def test_a_host_is_listed_while_a_url_leads_there_in_the_same_way(
    names: Names, listed: str, answers: bool
) -> None:
    names["elsewhere.test"] = ["10.0.0.9"]
    host = BrokerHost(URL("amqp://u:p@rabbit.test/v"), FIRST)

    assert await is_listed(host, [URL(each) for each in listed.split(",")], ENOUGH) is answers


async def test_a_host_is_listed_while_its_name_has_the_address_and_while_nobody_can_tell(names: Names) -> None:
    url = URL(f"amqp://{NAME}")

    assert await is_listed(BrokerHost(url, SECOND), [url], ENOUGH)
    names[NAME] = [FIRST]
    assert not await is_listed(BrokerHost(url, SECOND), [url], ENOUGH)
    names[NAME] = []
    assert await is_listed(BrokerHost(url, SECOND), [url], ENOUGH)


@pytest.mark.parametrize(
    ("listed", "answers"),
    [("cafile=a&certfile=b", True), ("certfile=b&cafile=a", True), ("cafile=c&certfile=b", False), ("", False)],
)
async def test_a_host_is_not_listed_any_more_when_what_is_asked_of_tls_changes(listed: str, answers: bool) -> None:
    host = BrokerHost(URL("amqps://10.0.0.1/?cafile=a&certfile=b"), "10.0.0.1")

    assert await is_listed(host, [URL(f"amqps://10.0.0.1/?{listed}")], ENOUGH) is answers
