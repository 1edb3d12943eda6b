"""Try a route that does not work, with one row on a channel of its own.

What becomes of that row touches no other. The broker closes a channel for a missing exchange; and RabbitMQ makes a
channel wait, and then the whole connection, that has sent a few dozen messages to a quorum queue without a leader.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiormq.abc import AbstractChannel as Underlay
from aiormq.exceptions import AMQPError

from relay.broker import connection as broker
from relay.broker.connection import Connection, words
from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.wire import Settle, Wire

ANSWER_WITHIN = 5.0  # seconds for the channel and the confirm, not counting those in which the broker blocks us
AT_ONCE = 16  # channels
LOST = "the connection was lost before the confirm"
# An answer for a single row that says what is wrong; after any other, nothing is known but that it did not get through.
TELLING = frozenset(Outcome) - {Outcome.NACKED, Outcome.SUSPECT, Outcome.UNKNOWN}


class Prober:
    """Sends rows through one connection, each on its own channel; every row is settled.

    Args:
        wire_on: gives a wire on a channel, which settles by the call given.
    """

    def __init__(
        self, connection: Connection, wire_on: Callable[[Underlay, Connection, Settle], Wire], settle: Settle
    ) -> None:
        self._connection = connection
        self._wire_on = wire_on
        self._settle = settle
        self._room = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[Settled]] = set()

    def send(self, row: Row, *, redelivered: bool) -> None:
        """Send a row; its outcome comes by `settle`, and never within this call."""
        task = asyncio.create_task(self._try(row, redelivered=redelivered), name=f"probe:{row.id}")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(row, task))

    def give_up(self) -> None:
        """Wait for no answer any more; what was sent is settled soon."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Give up, and return when every row is settled."""
        self.give_up()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _end(self, row: Row, task: asyncio.Task[Settled]) -> None:
        self._tasks.discard(task)
        settled = Settled((row,), Outcome.BARRED, LOST)
        if not task.cancelled():  # by `give_up`, or by the library when the connection goes away
            settled = task.result()
        self._settle(settled)

    async def _try(self, row: Row, *, redelivered: bool) -> Settled:
        async with self._room:
            try:
                settled = await self._answer(row, redelivered=redelivered)
            except (AMQPError, OSError, RuntimeError) as error:
                return Settled((row,), Outcome.BARRED, words(error))
        return settled if settled.outcome in TELLING else settled._replace(outcome=Outcome.BARRED)

    async def _answer(self, row: Row, *, redelivered: bool) -> Settled:
        answer: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()
        sending = asyncio.create_task(self._send(row, answer, redelivered=redelivered), name="probe")
        either: set[asyncio.Future[Any]] = {answer, sending}
        clock = self._connection.clock
        until = clock() + ANSWER_WITHIN
        try:
            while not answer.done() and not sending.done() and (left := until - clock()) > 0:
                await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            (error,) = await asyncio.gather(sending, return_exceptions=True)
        if answer.done():
            return answer.result()
        if isinstance(error, Exception):
            raise error
        reason = f"no confirm within {ANSWER_WITHIN:g} s" if clock() >= until else LOST
        return Settled((row,), Outcome.BARRED, reason)

    async def _send(self, row: Row, answer: asyncio.Future[Settled], *, redelivered: bool) -> None:
        def settle(settled: Settled) -> None:
            if not answer.done():
                answer.set_result(settled)

        opened = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        channel = await opened.get_underlay_channel()
        if broker.is_told_to_end():  # which the library swallows while it opens a channel
            raise asyncio.CancelledError
        wire = self._wire_on(channel, self._connection, settle)
        try:
            wire.send((row,), {row.id} if redelivered else set())
            await wire.run()
        finally:
            for lost in await wire.close():
                if channel.is_closed:  # by the broker, which says why
                    settle(lost)
            if not channel.is_closed:
                await broker.close_channel(channel)
