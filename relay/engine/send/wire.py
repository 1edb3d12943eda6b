"""What the publisher needs of a channel in confirm mode, and what the broker's answers mean.

`FrameWire` (frames.py) is the fast way. `PlainWire` (plain_wire.py) is the library's documented way behind the same
interface. Both pass tests/engine/test_wire.py.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiormq.exceptions import (
    AMQPChannelError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.routes import Address, Router

Settle = Callable[[Settled], None]
NACKED = "the broker refused it for now (basic.nack)"
# RabbitMQ: "NOT_FOUND - no exchange 'x' in vhost '/'", "ACCESS_REFUSED - access to exchange 'x' in vhost '/' refused
# for user 'u'", and with permissions by topic "access to topic 'k' in exchange 'x' in vhost '/' refused for ...".
# They have 255 bytes at most: "..." stands for the rest, wherever that begins.
ADDRESS_NAMED = re.compile(r"(?:exchange|topic) '.*", re.DOTALL)
# Also what closes the whole connection: frames that the broker cannot read, or a message that it stumbles over.
BLAMES_A_MESSAGE = (
    AMQPChannelError,
    ConnectionFrameError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    ConnectionNotImplemented,
    ConnectionInternalError,
)


def returned_words(frame: Any) -> str:
    """Say in the broker's words why it returned a message."""
    return f"{frame.reply_code} {frame.reply_text}: nothing is bound for its routing key"


def after_close(rows: Sequence[Row], closing: asyncio.Future[Any], router: Router) -> list[Settled]:
    """Tell what became of the rows that were in flight when their channel went away.

    The broker closes a channel, and for some reasons the connection, on account of one message. When it is the
    message's address the broker's words name it; else, with one message in flight, it is that. An internal error (541)
    says only that a process of the broker's has died, of this message or of something else: no more than a suspicion.
    """
    if not rows:
        return []
    error = closing.exception() if closing.done() and not closing.cancelled() else None
    if not isinstance(error, BLAMES_A_MESSAGE):
        return [Settled(rows, Outcome.UNKNOWN, "the connection was lost before the confirm")]
    words = " ".join(str(arg) for arg in error.args if arg is not None)
    if isinstance(error, ChannelNotFoundEntity | ChannelAccessRefused):
        barred = [row for row in rows if _is_named(router.address(row), words)]
        if barred:
            others = [row for row in rows if not _is_named(router.address(row), words)]
            unknown = Settled(others, Outcome.UNKNOWN, "another message closed the channel before the confirm")
            return [Settled(barred, Outcome.BARRED, words), *([unknown] if others else [])]
    if len(rows) > 1 or isinstance(error, ConnectionInternalError):
        return [Settled(rows, Outcome.SUSPECT, words)]
    is_rejected = isinstance(error, ChannelPreconditionFailed)
    return [Settled(rows, Outcome.REJECTED if is_rejected else Outcome.REFUSED, words)]


def names_address(words: str) -> bool:
    """Whether the broker's words say that an exchange is missing, or that it or a topic is forbidden."""
    return ADDRESS_NAMED.search(words) is not None


def forbids_topic(words: str) -> bool:
    """Whether the broker's words forbid a topic, and not the whole exchange."""
    found = ADDRESS_NAMED.search(words)
    return found is not None and found[0].startswith("topic")


def _is_named(address: Address, words: str) -> bool:
    if (found := ADDRESS_NAMED.search(words)) is None:
        return False
    named = found[0].encode()
    expected = b"exchange '" + (address.exchange or b"amq.default") + b"' in vhost '"
    if named.startswith(b"topic"):
        expected = b"topic '" + address.routing_key + b"' in " + expected
    if named.startswith(expected):
        return True
    return words.endswith("...") and expected.startswith(named[:-3])


class Wire(Protocol):
    """What the publisher needs of a channel."""

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet settled."""

    def send(self, rows: Sequence[Row], redelivered: set[int]) -> None:
        """Send in this order; the outcome of each comes by the wire's `settle`, and never within this call.

        Rows whose id is in `redelivered` carry the header that says so.
        """

    async def run(self) -> None:
        """Carry what is sent until the channel closes."""

    async def close(self) -> list[Settled]:
        """Give what became of the rows still in flight when the wire is used no more."""

    def unconfirmed_for(self, now: float) -> float:
        """Tell for how many seconds the oldest row in flight has waited, by the clock that the wire was given."""

    def sent_before(self, moment: float) -> list[Row]:
        """Give the rows in flight that were sent before then, by that clock."""
