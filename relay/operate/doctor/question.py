"""Questions to a broker that change nothing, each on a separate channel: a wrong one closes the channel.

AMQP has no verb to ask what an exchange is like, or whether we may publish to it. RabbitMQ shows it all the same when
it refuses. It looks at what was asked for in a fixed order, and the last thing that it looks at is one that we made
impossible. Nothing is declared and nothing is routed, also when what we ask about goes away at this moment.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from aiormq.abc import AbstractChannel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    PublishError,
)
from pamqp.commands import Basic

from relay.servers.rabbitmq.connection import Connection, close_channel, is_told_to_end, open_channel, words

Question = Callable[[AbstractChannel], Awaitable[object]]

# RabbitMQ looks at size, permission, exchange and then this, and routes the message after that. So in the tests with
# 3.10, and in the source of 4.
NO_TIME = Basic.Properties(expiration="outbox-doctor")
# Compared last with those of an exchange or queue that is there; without such an exchange or queue, nothing can be made
# with it.
NO_ALTERNATE = {"alternate-exchange": 0}
NO_LOCATOR = {"x-queue-leader-locator": "outbox-doctor"}

DIFFERS = re.compile(r"inequivalent arg '([^']+)' .* but current is (?:the value )?'?(.*?)'?(?: of type '\w+')?$")


class BrokerAnswer(Enum):
    """What a broker makes of a question."""

    YES = auto()
    MISSING = auto()  # 404 NOT_FOUND
    FORBIDDEN = auto()  # 403 ACCESS_REFUSED
    REFUSED = auto()  # 406 PRECONDITION_FAILED
    RETURNED = auto()  # a message for which there is no queue
    NONE = auto()  # or no answer that we know


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and the broker's own words; none for a yes."""

    answer: BrokerAnswer
    words: str = ""

    @property
    def difference(self) -> tuple[str, str] | None:
        """The first thing that is not as was asked for, and how it is; None when the words name no such thing."""
        found = DIFFERS.search(self.words) if self.answer is BrokerAnswer.REFUSED else None
        return (found[1], found[2]) if found else None


ANSWERS: dict[type[Exception], BrokerAnswer] = {
    ChannelNotFoundEntity: BrokerAnswer.MISSING,
    ChannelAccessRefused: BrokerAnswer.FORBIDDEN,
    ChannelPreconditionFailed: BrokerAnswer.REFUSED,
    PublishError: BrokerAnswer.RETURNED,
}


async def ask(connection: Connection, question: Question, within: float) -> Reply:
    """Return the broker's answer; NONE after `within` seconds, or when the connection is lost."""
    try:
        async with asyncio.timeout(within):
            channel = await open_channel(connection, confirms=True)
            await question(channel)
            await close_channel(channel)
    except TimeoutError:
        return Reply(BrokerAnswer.NONE, f"no answer within {within:g} s")
    except (AMQPError, OSError, RuntimeError) as error:
        return Reply(ANSWERS.get(type(error), BrokerAnswer.NONE), words(error))
    except asyncio.CancelledError:
        if is_told_to_end():
            raise
        return Reply(BrokerAnswer.NONE, "the connection was lost")
    return Reply(BrokerAnswer.YES)


def is_exchange(name: str) -> Question:
    """Ask whether there is one."""
    return lambda channel: channel.exchange_declare(exchange=name, passive=True)


def is_queue(name: str) -> Question:
    """Ask whether there is one."""
    return lambda channel: channel.queue_declare(name, passive=True)


def exchange_like(name: str, kind: str, *, durable: bool) -> Question:
    """Ask what is different about an exchange: refused in any case, and `alternate-exchange` is what comes last."""
    return lambda channel: channel.exchange_declare(
        exchange=name, exchange_type=kind, durable=durable, arguments={**NO_ALTERNATE}
    )


def queue_like(name: str, *, durable: bool, arguments: dict[str, Any]) -> Question:
    """Ask what is different about a queue: nothing when yes, or when it is the `x-queue-leader-locator`."""
    return lambda channel: channel.queue_declare(name, durable=durable, arguments={**arguments, **NO_LOCATOR})


def publish_refused(exchange: str, routing_key: str, size: int = 0) -> Question:
    """Ask whether we may publish there: refused when we may, and forbidden when not."""
    return lambda channel: channel.basic_publish(
        bytes(size), exchange=exchange, routing_key=routing_key, properties=NO_TIME, mandatory=True
    )
