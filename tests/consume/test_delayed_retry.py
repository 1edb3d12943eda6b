"""Delayed retry by RabbitMQ 4.3, by the policy that docs/consumer.md tells to set."""

import json
import re
from pathlib import Path
from time import monotonic

import aio_pika
import pytest
from yarl import URL

from relay.testing.servers.rabbitmq import RabbitServer
from tests.consume.effects import Queue
from tests.support.eventually import eventually
from tests.support.versions import rabbitmq_version

PAGE = Path(__file__).parents[2] / "docs" / "consumer.md"
COMMAND = re.compile(r"rabbitmqctl set_policy (invoices-retry) '(.*)' \\\n +'(.*)' (--apply-to) (quorum_queues)")


@pytest.mark.parametrize("ending", ["reject", "close"])
async def test_what_is_rejected_or_was_in_hand_at_the_end_of_a_channel_comes_back_later(
    ending: str, queue: Queue, broker_url: str, rabbitmq: RabbitServer
) -> None:
    """The second is why the page tells to set the policy only where order does not matter."""
    if tuple(map(int, rabbitmq_version(rabbitmq).split("."))) < (4, 3):
        pytest.skip("RabbitMQ has delayed retry from 4.3 on")
    (policy,) = COMMAND.findall(PAGE.read_text())
    rabbitmq.ctl("set_policy", "-p", URL(broker_url).path.removeprefix("/"), *policy)
    queue.name = "invoices"
    await queue.declare()
    await queue.send(1)

    async with await aio_pika.connect(broker_url) as connection:
        channel = await connection.channel()
        message = await (await channel.get_queue(queue.name)).get()
        given_back = monotonic()
        if ending == "reject":
            await message.reject(requeue=True)
    taken: list[aio_pika.abc.AbstractIncomingMessage] = []

    async def has_come_back() -> bool:
        taken.extend(await queue.ready())
        return bool(taken)

    await eventually(has_come_back, "it comes back", 30)

    assert monotonic() - given_back >= json.loads(policy[2])["delayed-retry-min"] / 1000
    assert taken[0].headers["x-delivery-count"] == 1
