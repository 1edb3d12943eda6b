"""Every use of undocumented names of aiormq, which a new release may change.

Because of them pyproject.toml pins the release. tests/test_insides.py names those that a release lacks.
"""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Any

import aiormq
from aiormq.abc import AbstractChannel, AbstractConnection, ChannelFrame
from aiormq.connection import FrameReceiver
from pamqp.commands import Basic
from pamqp.commands import Connection as Methods

from relay.servers.rabbitmq.frames import FrameReader

MOST_CHANNELS = 65535  # if the broker sets no limit

Take = Callable[[Any], Coroutine[Any, Any, None]]  # its argument is a pair: the frame's weight and the frame


class Underlay(aiormq.Connection):
    """The library's connection, which reads with a `FrameReader` once it is open, and uses channel numbers in turn."""

    async def channel(self, channel_number: int | None = None, *args: Any, **kwargs: Any) -> AbstractChannel:
        return await super().channel(channel_number or self._next_number(), *args, **kwargs)

    def _next_number(self) -> int:
        """Return the number of a new channel.

        The library would use a number that the broker has just closed, and may open it before it has written its
        `channel.close-ok`. Then the broker ends the connection.
        """
        most = self.connection_tune.channel_max or MOST_CHANNELS
        numbers = chain(range(self._last_number + 1, most + 1), range(1, self._last_number + 1))
        self._last_number = next((each for each in numbers if each not in self.channels), most + 1)
        return self._last_number

    _last_number = 0

    async def _Connection__reader(self, receiver: FrameReceiver) -> None:  # noqa: N802  (private to the library)
        await super()._Connection__reader(FrameReader(receiver.reader))  # type: ignore[misc]


def last_frame_at(connection: AbstractConnection) -> float:
    """Return when the last frame came, by the event loop's clock. By this the library gives up, too, but much later."""
    last: float = connection._Connection__last_frame_time  # type: ignore[attr-defined]
    return last


def hear_of_blocks(
    connection: AbstractConnection,
    block: Callable[[Methods.Blocked], None],
    unblock: Callable[[Methods.Unblocked], None],
) -> None:
    """Call these before the library's own handlers: it has no event for blocks, and `ready()` has no reason."""
    for name, act in (("blocked", block), ("unblocked", unblock)):
        handler = f"_Connection__handle_connection_{name}"
        setattr(connection, handler, _both(act, getattr(connection, handler)))


def take_frames(channel: AbstractChannel, take: Take) -> Take:
    """Let `take` get each frame of a channel from the connection's reader.

    Returns:
        The function that passes a frame on to the channel.
    """
    pass_on: Take = channel.frames.put
    channel.frames.put = take  # type: ignore[method-assign,assignment]
    return pass_on


def give_frames_back(channel: AbstractChannel, pass_on: Take) -> None:
    """Let the channel get its frames again, but no confirms: the library would warn of one that comes late."""

    async def pass_others_on(weighed: tuple[int, Any]) -> None:
        if not isinstance(weighed[1], Basic.Ack | Basic.Nack):
            await pass_on(weighed)

    channel.frames.put = pass_others_on  # type: ignore[method-assign,assignment]


def write_queue(channel: AbstractChannel) -> "asyncio.Queue[ChannelFrame]":
    """Return the queue of the frames that the connection's writer writes."""
    queue: asyncio.Queue[ChannelFrame] = channel.write_queue  # type: ignore[attr-defined]
    return queue


def answers(channel: AbstractChannel) -> "asyncio.Queue[Any]":
    """Return the queue of the broker's answers to requests on a channel."""
    queue: asyncio.Queue[Any] = channel.rpc_frames  # type: ignore[attr-defined]
    return queue


def _both(act: Callable[[Any], None], handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def handle(frame: Methods.Blocked | Methods.Unblocked) -> None:
        act(frame)
        await handler(frame)

    return handle
