"""Try a route that does not work, or ask whether an exchange works, each on a separate channel.

Whatever happens to that channel affects no other row. The broker closes a channel for a missing exchange. RabbitMQ also
makes a channel wait after a few dozen messages to a quorum queue without a leader, and then the whole connection.

A broker whose disk is full, or for which the user's token has ended, closes the channel over each message. It says so
in the same way as of a message that is too large, or of a forbidden exchange. So the prober first asks whether the
broker takes an empty message, for this address and for others (`judge`).
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from aiormq.abc import AbstractChannel as Underlay
from aiormq.abc import ChannelFrame
from aiormq.exceptions import AMQPChannelError, AMQPError
from pamqp import frame
from pamqp.commands import Basic, Tx
from pamqp.header import ContentHeader

from relay.engine.row import Address, Outcome, Row, Settled
from relay.engine.send.frames import publish_frame
from relay.engine.send.routes import Router
from relay.engine.send.wire import Settle, Wire, forbids_exchange, names_address
from relay.errors import BrokerUnavailableError
from relay.servers.rabbitmq import connection as broker
from relay.servers.rabbitmq.connection import Connection, answer_within, words
from relay.servers.rabbitmq.insides import answers, write_queue

# Seconds for the channel and the confirm. While the broker blocks publishing, they count for a question only.
ANSWER_WITHIN = 5.0
AT_ONCE = 16  # channels for rows, and the same number for questions
MOST_ASKED = 50  # addresses of one judgement
LOST = "the connection was lost before the confirm"
# Otherwise an exchange of the type x-recent-history would keep the message in spite of the rollback.
NOT_KEPT = ContentHeader(properties=Basic.Properties(headers={"x-recent-history-no-store": True}))
NO_CHANNEL = (AMQPError, OSError, RuntimeError)
BLAMES_THE_ROW = frozenset({Outcome.REFUSED, Outcome.REJECTED})
# Outcomes that say what is wrong with a single row. Any other says only that the row did not get through.
TELLING = frozenset(Outcome) - {Outcome.NACKED, Outcome.SUSPECT, Outcome.UNKNOWN}


class RefusedAll(NamedTuple):
    """A broker that refuses every message."""

    words: str  # the broker's
    asked: Sequence[Address]  # all refused


class Prober:
    """Sends rows through one connection, each on its own channel, and settles every row.

    Args:
        wire_on: returns a wire on a channel; the wire passes outcomes to the given `Settle`.
        router: finds the addresses of rows.
    Attributes:
        refused_all: set when the broker has refused every message; the connection is of no more use.
        unanswered_since: since when messages have no answer, by the connection's clock; None once one has come.
    """

    def __init__(
        self,
        connection: Connection,
        wire_on: Callable[[Underlay, Connection, Settle], Wire],
        settle: Settle,
        router: Router,
    ) -> None:
        self.router = router
        self.refused_all: RefusedAll | None = None
        self.unanswered_since: float | None = None
        self._connection = connection
        self._wire_on = wire_on
        self._settle = settle
        self._room = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[Settled]] = set()
        self._room_to_ask = asyncio.Semaphore(AT_ONCE)  # a separate limit: rows may wait seconds for a confirm
        self._questions: set[asyncio.Task[str]] = set()

    def send(self, row: Row, *, redelivered: bool) -> None:
        """Send a row. The prober passes its outcome to `settle`, and never within this call."""
        task = asyncio.create_task(self._try(row, redelivered=redelivered), name=f"probe:{row.id}")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(row, task))

    def ask(self, address: Address, done: Callable[[str], None], *, at_once: bool) -> None:
        """Ask whether the broker takes messages for an address.

        Args:
            done: gets the broker's refusal, never within this call; "" if the broker takes messages or does not answer
                in time.
            at_once: whether to ask without waiting for one of the `AT_ONCE` channels.
        Raises:
            UnsendableError: the address has a name that is too long to ask for.
        """
        publish_frame(0, address)
        task = asyncio.create_task(self._refusal(address, at_once=at_once), name="ask")
        self._questions.add(task)

        def end(task: asyncio.Task[str]) -> None:
            self._questions.discard(task)
            refusal = ""
            try:
                if not task.cancelled():
                    refusal = task.result()
            finally:
                done(refusal)

        task.add_done_callback(end)

    async def judge(self, lost: Sequence[Settled]) -> Sequence[Settled]:
        """Return what became of rows on a channel that has closed, after a look at what else the broker takes.

        A refused row is to blame only if the broker takes an empty message for its address; otherwise the address is.
        If the broker takes nothing for any address that it is asked for, the rows are unknown.
        """
        doubted = next((each for each in lost if _is_doubtful(each)), None)
        if doubted is None or self._connection.is_lost:
            return lost
        own = self.router.address(doubted.rows[0])
        addresses = (own, *(self.router.address(row) for each in lost for row in each.rows))
        try:
            refusals = await self._ask_all(addresses)
        except (*NO_CHANNEL, BrokerUnavailableError):
            return [each._replace(outcome=Outcome.UNKNOWN) for each in lost]
        if doubted.outcome in BLAMES_THE_ROW and not refusals[own]:
            return lost
        if self._note_refused_all(refusals, doubted.reason):
            return [each._replace(outcome=Outcome.UNKNOWN) for each in lost]
        return [doubted._replace(outcome=Outcome.BARRED)] if doubted.outcome in BLAMES_THE_ROW else lost

    async def still_refuses_all(self, refused: RefusedAll) -> bool:
        """Whether the broker still refuses what it has refused on an earlier connection."""
        try:
            return self._note_refused_all(await self._ask_all(refused.asked), refused.words)
        except BrokerUnavailableError as error:
            raise ConnectionResetError(str(error)) from error

    async def _ask_all(self, addresses: Iterable[Address]) -> dict[Address, str]:
        """Return the broker's refusal by address, also for the exchanges of the settings; "" where it takes messages.

        Raises:
            NO_CHANNEL, BrokerUnavailableError: the broker does not answer.
        """
        first, *others = addresses
        own = (Address(exchange, b"") for exchange in (b"", *self.router.own_exchanges))
        asked = list(dict.fromkeys((first, *own, *others)))[:MOST_ASKED]
        return dict(zip(asked, await asyncio.gather(*map(self._answer_for, asked)), strict=True))

    def _note_refused_all(self, refusals: dict[Address, str], words: str) -> bool:
        if all(refusals.values()):
            self.refused_all = RefusedAll(words, list(refusals))
        return self.refused_all is not None

    def give_up(self) -> None:
        """Stop waiting for rows; each row that was sent settles soon."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Give up, and return when every row is settled and every question has ended."""
        self.give_up()
        for question in self._questions:
            question.cancel()
        if tasks := [*self._tasks, *self._questions]:
            await asyncio.wait(tasks)

    def _end(self, row: Row, task: asyncio.Task[Settled]) -> None:
        self._tasks.discard(task)
        settled = Settled((row,), Outcome.BARRED, LOST)
        try:
            if not task.cancelled():  # by `give_up`, or by the library when the connection is lost
                settled = task.result()
        finally:
            self._settle(settled)

    async def _try(self, row: Row, *, redelivered: bool) -> Settled:
        async with self._room:
            try:
                (settled,) = await self.judge([await self._answer(row, redelivered=redelivered)])
            except NO_CHANNEL as error:
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
            self.unanswered_since = None
            return answer.result()
        if isinstance(error, Exception):
            raise error
        if clock() < until:
            return Settled((row,), Outcome.BARRED, LOST)
        self.note_unanswered(ANSWER_WITHIN)
        return Settled((row,), Outcome.BARRED, f"no confirm within {ANSWER_WITHIN:g} s")

    @property
    def unanswered_for(self) -> float:
        """The seconds for which messages have no answer, without those in which the broker blocks publishing."""
        return 0.0 if self.unanswered_since is None else self._connection.clock() - self.unanswered_since

    def note_unanswered(self, seconds: float) -> None:
        """Note that a message has had no answer for this number of seconds."""
        if self.unanswered_since is None:
            self.unanswered_since = self._connection.clock() - seconds

    async def _send(self, row: Row, answer: asyncio.Future[Settled], *, redelivered: bool) -> None:
        def settle(settled: Settled) -> None:
            if not answer.done():
                answer.set_result(settled)

        channel = await broker.open_channel(self._connection, confirms=True)
        wire = self._wire_on(channel, self._connection, settle)
        try:
            wire.send((row,), {row.id} if redelivered else set())
            await wire.run()
        finally:
            for lost in await wire.close():
                if channel.is_closed:  # by the broker, whose words are in the outcome
                    settle(lost)
            if not channel.is_closed:
                await broker.close_channel(channel)

    async def _refusal(self, address: Address, *, at_once: bool) -> str:
        async with nullcontext() if at_once else self._room_to_ask:
            try:
                refusal = await self._answer_for(address)
                if forbids_exchange(refusal) and self._note_refused_all(await self._ask_all([address]), refusal):
                    return ""
            except (*NO_CHANNEL, BrokerUnavailableError):
                return ""  # the relay sends the rows, and the wire sees their outcome
        return refusal if names_address(refusal) else ""

    async def _answer_for(self, address: Address) -> str:
        """Return the broker's refusal of an empty message for an address; "" if it takes one.

        Raises:
            NO_CHANNEL, BrokerUnavailableError: the broker does not answer.
        """
        channel = await broker.open_channel_within(self._connection, ANSWER_WITHIN)
        try:
            await self._publish_and_take_back(channel, address)
        except AMQPChannelError as error:
            return words(error)
        finally:
            if not channel.is_closed:
                await broker.close_channel(channel)
        return ""

    async def _publish_and_take_back(self, channel: Underlay, address: Address) -> None:
        """Publish an empty message in a transaction, and roll it back. The broker checks it, and no queue gets it.

        A passive declare would need no transaction, but it does not check permissions.
        """
        async with answer_within("ask for an exchange", ANSWER_WITHIN):
            await channel.tx_select()
            if not address.exchange:  # the routing key may be a direct reply queue, to which RabbitMQ delivers at once
                address = address._replace(routing_key=b"")
            # In one write: a rollback after the library's answer to a close would end the connection.
            question = publish_frame(channel.number, address) + b"".join(
                frame.marshal(each, channel.number) for each in (NOT_KEPT, Tx.Rollback())
            )
            await write_queue(channel).put(ChannelFrame(question, should_close=False))
            answer = asyncio.create_task(answers(channel).get())
            try:
                await asyncio.wait({answer, channel.closing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                answer.cancel()
            if channel.closing.done():
                channel.closing.result()


def _is_doubtful(settled: Settled) -> bool:
    """Whether the broker may refuse every message in this way."""
    if settled.outcome is Outcome.BARRED:
        return forbids_exchange(settled.reason)
    return settled.outcome is Outcome.SUSPECT or settled.outcome in BLAMES_THE_ROW
