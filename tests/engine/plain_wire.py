"""The oracle of `FrameWire`: messages by the library's documented interface, one `basic_publish` for each.

It is several times slower. tests/engine/test_wire.py runs the contract of a wire over both, and other tests compare the
frames of the codecs with `properties`.
"""

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError, DeliveryError, PublishError
from pamqp.commands import Basic, Channel
from pamqp.header import ContentHeader

from relay.engine.row import Outcome, Row, Settled
from relay.engine.send.frames import FRAME_OVERHEAD, MANDATORY
from relay.engine.send.message import (
    ENCODING_ERRORS,
    PERSISTENT,
    WRITER,
    MessageIdentity,
    check_header_frame,
    check_row,
    content_type,
    extra_headers,
    not_sent,
    unix_time,
)
from relay.engine.send.routes import Router
from relay.engine.send.wire import NACKED, Settle, after_close, returned_words
from relay.observe.histogram import Histogram
from relay.servers.rabbitmq.content_header import Properties
from relay.servers.rabbitmq.insides import take_frames


class PlainWire:
    """See `wire.Wire`, and `frames.FrameWire` for the arguments that both take."""

    def __init__(
        self,
        channel: AbstractChannel,
        router: Router,
        identity: MessageIdentity,
        settle: Settle,
        *,
        clock: Callable[[], float] | None = None,
        times: Histogram | None = None,
    ) -> None:
        self._channel = channel
        self._router = router
        self._identity = identity
        self._settle = settle
        self._times = times
        self._clock = clock or asyncio.get_running_loop().time
        self._rows: dict[asyncio.Task[None], Row] = {}
        self._ids: dict[bytes, asyncio.Task[None]] = {}  # message_id -> the last task that sends it
        self._started: dict[asyncio.Task[None], float] = {}
        self._is_closing = False  # the broker closes the channel
        self._pass_on = take_frames(channel, self._take)

    @property
    def in_flight(self) -> int:
        return len(self._rows)

    def send(self, rows: Iterable[Row], redelivered: set[int]) -> None:
        for row in rows:
            twin = self._ids.get(row.message_id)
            # Each task takes the channel's lock, which is fair: the messages leave in this order.
            task = asyncio.create_task(
                self._publish(row, twin, redelivered=row.id in redelivered), name=f"publish:{row.id}"
            )
            self._rows[task] = row
            self._ids[row.message_id] = task
            self._started[task] = self._clock()

    async def run(self) -> None:
        await asyncio.wait([self._channel.closing])

    async def close(self) -> list[Settled]:
        tasks, lost = tuple(self._rows), tuple(self._rows.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._rows.clear()
        self._started.clear()
        self._ids.clear()
        return after_close(lost, self._channel.closing, self._router)

    def unconfirmed_for(self, now: float) -> float:
        return now - next(iter(self._started.values()), now)

    def sent_before(self, moment: float) -> list[Row]:
        return [row for task, row in self._rows.items() if self._started[task] < moment]

    async def _take(self, item: tuple[int, Any]) -> None:
        """Stop sending before the channel answers the broker's close.

        Otherwise the library still publishes the messages that wait for its lock, and the broker ends the connection.
        """
        if type(item[1]) is Channel.Close:
            self._is_closing = True
            for task in self._rows:
                task.cancel()
        await self._pass_on(item)

    async def _publish(self, row: Row, twin: asyncio.Task[None] | None, *, redelivered: bool) -> None:
        # The library finds a returned message by its message_id: two with the same id must not be in flight together.
        if twin is not None:
            await asyncio.wait([twin])
        if self._is_closing:
            return  # `close` settles it
        try:
            settled = Settled((row,), *await self._outcome(row, redelivered=redelivered))
        # CancelledError as well: the library raises it when the connection is lost during a publish.
        except (AMQPError, OSError, asyncio.CancelledError):
            return  # `close` settles the row
        sent_at = self._forget()
        if settled.outcome is Outcome.CONFIRMED and self._times is not None:
            self._times.observe(self._clock() - sent_at)
        self._settle(settled)

    async def _outcome(self, row: Row, *, redelivered: bool) -> tuple[Outcome, str]:
        try:
            check_row(row, self._identity)
            address = self._router.allowed_address(row)
            described = properties(row, self._identity, redelivered=redelivered)
            size = len(ContentHeader(properties=described).marshal()) + FRAME_OVERHEAD
            check_header_frame(size, self._channel.connection.connection_tune.frame_max)
            await self._channel.basic_publish(
                row.body,
                exchange=address.exchange.decode(),
                routing_key=address.routing_key.decode(),
                properties=described,
                mandatory=bool(MANDATORY),
            )
        except PublishError as error:
            return Outcome.RETURNED, returned_words(error.frame)
        except DeliveryError:
            return Outcome.NACKED, NACKED
        except ENCODING_ERRORS as error:  # nothing was sent
            return Outcome.UNSENDABLE, not_sent(str(error))
        return Outcome.CONFIRMED, ""

    def _forget(self) -> float:
        """Forget this task's row, and return when the row was sent."""
        task = asyncio.current_task()
        assert task is not None, "called in a task only"
        row = self._rows.pop(task)
        if self._ids.get(row.message_id) is task:
            del self._ids[row.message_id]
        return self._started.pop(task)


def properties(row: Row, identity: MessageIdentity, *, redelivered: bool) -> Basic.Properties:
    """Return the properties of a row's message, in the library's type."""
    headers: dict[str, Any] = {"x-aggregate-type": row.aggregate_type.decode()}
    if row.aggregate_id is not None:
        headers["x-aggregate-id"] = row.aggregate_id.decode()
    if row.written_as:
        headers[WRITER] = row.written_as.decode()
    headers |= {"x-outbox-id": row.id, "x-outbox-lane": row.lane, **identity.stamp}
    headers |= extra_headers(row, identity, redelivered=redelivered)
    return Properties(
        content_type=content_type(row).decode(),
        headers=headers,
        delivery_mode=PERSISTENT,
        message_id=row.message_id.decode(),
        timestamp=datetime.fromtimestamp(unix_time(row), tz=UTC),
        message_type=row.event_type.decode(),
        app_id=identity.app_id.decode(),
    )
