"""What the sender needs from a channel in confirm mode, and what the broker's answers mean.

`FrameWire` (frames.py) is the implementation. tests/engine/test_wire.py compares it with the library's documented
interface.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
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

from relay.engine.row import Address, Outcome, Row, Settled
from relay.engine.send.routes import Router

Settle = Callable[[Settled], None]
NACKED = "the broker refused it for now (basic.nack)"
# RabbitMQ's words are `NOT_FOUND - no exchange 'x' in vhost '/'`, `ACCESS_REFUSED - access to exchange 'x' in vhost '/'
# refused for user 'u'`, and with permissions by topic `access to topic 'k' in exchange 'x' in vhost '/' refused for`.
# They have at most 255 bytes. RabbitMQ cuts longer words anywhere, and ends them with "...".
ADDRESS_NAMED = re.compile(r"(?:exchange|topic) '.*", re.DOTALL)
# Also errors that close the whole connection: the broker cannot read a frame, or fails on a message.
BLAMES_A_MESSAGE = (
    AMQPChannelError,
    ConnectionFrameError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    ConnectionNotImplemented,
    ConnectionInternalError,
)


def returned_words(frame: Any) -> str:
    """Return the broker's words for why it returned a message."""
    return f"{frame.reply_code} {frame.reply_text}: nothing is bound for its routing key"


def after_close(rows: Sequence[Row], closing: asyncio.Future[Any], router: Router) -> list[Settled]:
    """Return what became of the rows that were in flight when their channel closed.

    The broker closes a channel, and for some reasons the connection, because of one message. If the message's address
    is the reason, the broker's words name it. Otherwise a message that was alone in flight is to blame.
    An internal error (541) says only that a process of the broker has died. The message may not be the reason, so it
    is a suspect.
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


def forbids_exchange(words: str) -> bool:
    """Whether the broker's words forbid a whole exchange."""
    return words.startswith("ACCESS_REFUSED") and names_address(words) and not forbids_topic(words)


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


class Suspects:
    """Rows that were in flight when the broker closed the channel because of one of them.

    They go out one at a time. A row that closes the channel alone is to blame. True while there are suspects.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._ids)

    def judge(self, settled: Settled) -> Settled:
        """Return the outcome to act on: REFUSED for a suspect that was alone and closed the channel again."""
        if not self._ids and settled.outcome is not Outcome.SUSPECT:
            return settled
        ids = {row.id for row in settled.rows}
        if settled.outcome is Outcome.SUSPECT:
            if len(settled.rows) != 1 or ids.isdisjoint(self._ids):
                self._ids |= ids
                return settled
            settled = settled._replace(outcome=Outcome.REFUSED)
        self._ids -= ids
        return settled

    def forget(self, ids: Collection[int]) -> None:
        """Remove these ids from the suspects."""
        self._ids.difference_update(ids)

    def clear(self) -> None:
        """Remove all suspects."""
        self._ids.clear()


class Wire(Protocol):
    """What the sender needs from a channel."""

    @property
    def in_flight(self) -> int:
        """The number of messages that were sent and are not settled."""

    def send(self, rows: Sequence[Row], redelivered: set[int]) -> None:
        """Send the rows in this order. The wire passes each outcome to its `settle`, and never within this call.

        Rows whose id is in `redelivered` get the header `x-outbox-redelivered`.
        """

    async def run(self) -> None:
        """Send what `send` was given until the channel closes."""

    async def close(self) -> list[Settled]:
        """Stop the wire, and return what became of the rows still in flight."""

    def unconfirmed_for(self, now: float) -> float:
        """Return for how many seconds the oldest row in flight has waited, by the wire's clock."""

    def sent_before(self, moment: float) -> list[Row]:
        """Return the rows in flight that were sent before this moment, by the wire's clock."""
