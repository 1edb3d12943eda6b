"""A broker that goes away while things are declared: what was not declared is told, and the rest is tried."""

import asyncio

import pytest
from pamqp.commands import Queue as QueueMethods
from pydantic import SecretStr

from relay.config.settings import BrokerSettings
from relay.config.topology import Queue, TopologySettings
from relay.errors import BrokerUnavailableError
from relay.servers.rabbitmq.topology import Standing, apply
from relay.testing.servers.rabbitmq import RabbitServer
from tests.support.definitions import definitions
from tests.support.proxied import proxied
from tests.support.proxy import Act, Way

THREE = TopologySettings(queues=tuple(Queue(name=name) for name in ("one", "two", "three")))


async def test_a_connection_lost_on_the_way_costs_one_thing(
    broker: BrokerSettings, broker_url: str, rabbitmq: RabbitServer
) -> None:
    async with proxied(broker) as (proxy, far):
        proxy.on_frame(Way.UP, QueueMethods.Declare, 3, Act.RESET)  # each is looked at, then declared: that of two

        results = await apply(far, THREE)

    assert [each.standing for each in results] == [Standing.DECLARED, Standing.FAILED, Standing.DECLARED]
    assert results[1].words.startswith("connection lost: ")
    assert set(definitions(rabbitmq, broker_url).queues) == {"one", "three"}


async def test_a_host_that_does_not_answer_is_left_for_the_next(
    broker: BrokerSettings, broker_url: str, rabbitmq: RabbitServer
) -> None:
    async with proxied(broker) as (proxy, far):
        proxy.on_frame(Way.DOWN, QueueMethods.DeclareOk, 2, Act.HOLD)  # one is declared, two was looked for
        urls = f"{far.url.get_secret_value()},{broker_url}"

        results = await apply(broker.model_copy(update={"url": SecretStr(urls)}), THREE)

    assert [each.standing for each in results] == [Standing.DECLARED, Standing.FAILED, Standing.DECLARED]
    assert results[1].words == "declare two: no answer within 10 s"


async def test_a_broker_that_goes_away_leaves_the_rest_untried_and_told(
    broker: BrokerSettings, broker_url: str, rabbitmq: RabbitServer
) -> None:
    async with proxied(broker) as (proxy, far), asyncio.TaskGroup() as tasks:
        proxy.on_frame(Way.DOWN, QueueMethods.DeclareOk, 1, Act.HOLD)
        applying = tasks.create_task(apply(far, THREE))
        await proxy.fired.wait()
        proxy.refusing = True
        proxy.cut()

        results = await applying

    assert [each.standing for each in results] == [Standing.FAILED] * 3
    assert f"127.0.0.1:{proxy.port}" in results[2].words


async def test_a_virtual_host_that_is_not_there_is_no_connection(
    broker: BrokerSettings, rabbitmq: RabbitServer
) -> None:
    nowhere = broker.model_copy(update={"url": SecretStr(rabbitmq.url("no-such-vhost"))})

    with pytest.raises(BrokerUnavailableError, match="vhost no-such-vhost not found"):
        await apply(nowhere, THREE)
