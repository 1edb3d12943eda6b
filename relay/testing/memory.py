"""A queue in memory, in place of the broker's: it delivers, takes acknowledgements, and keeps copies."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.common import FieldTable
from pamqp.header import ContentHeader

from relay.config.settings import BrokerSettings
from relay.consume.failed.queues import dead_queue_name
from relay.engine.row import Row
from relay.engine.send.frames import END, FRAME_START, Encoder
from relay.engine.send.message import POSTGRES_EPOCH, MessageIdentity, UnsendableError
from relay.engine.send.routes import Router
from relay.servers.rabbitmq.content_header import decode_header
from relay.testing.written import Written

CHANNEL = 1
NO_TIME = timedelta()
NO_LIMIT = 2**63 - 1  # bytes: `add` has a limit, and a relay may have another

Deliver = Callable[[DeliveredMessage], Awaitable[None]]


@dataclass(frozen=True)
class QueuedMessage:
    """A message in the queue, as it came there."""

    exchange: str
    routing_key: str
    header: ContentHeader
    body: bytes
    redelivered: bool = False

    def delivered(self, tag: int) -> DeliveredMessage:
        # The library's constructors refuse some names that brokers take.
        delivery = Basic.Deliver("", tag, redelivered=self.redelivered)
        delivery.exchange, delivery.routing_key = self.exchange, self.routing_key
        return DeliveredMessage(delivery=delivery, header=self.header, body=self.body, channel=None)  # type: ignore[arg-type]


@dataclass
class MemoryQueue:
    """The consumed queue, with its retry queues and its dead letters.

    Attributes:
        ready: what is delivered next.
        waiting: copies in retry queues, each with the time after which it comes back.
        dead: copies that are dead letters.
    """

    name: str
    ready: list[QueuedMessage] = field(default_factory=list)
    waiting: list[tuple[timedelta, QueuedMessage]] = field(default_factory=list)
    dead: list[QueuedMessage] = field(default_factory=list)

    async def publish(self, queue: str, properties: Basic.Properties, body: bytes) -> None:
        """Keep a copy, as `CopyPublisher.publish` hands it to the broker."""
        header = ContentHeader(body_size=len(body), properties=properties)
        if queue == dead_queue_name(self.name):
            self.dead.append(QueuedMessage("", queue, header, body))
            return
        wait = timedelta(milliseconds=int(properties.expiration or 0))
        death: FieldTable = {
            "count": 1, "exchange": "", "queue": queue, "reason": "expired", "routing-keys": [queue],
            "time": datetime.now(UTC),
        }  # fmt: skip
        properties.headers = {**(properties.headers or {}), "x-death": [death]}
        properties.expiration = None
        self.waiting.append((wait, QueuedMessage("", self.name, header, body)))

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def next_due(self) -> timedelta | None:
        """Return the time until the next copy comes back; None: no copy waits."""
        return min((wait for wait, _ in self.waiting), default=None)

    def bring_forward(self, time: timedelta) -> None:
        """Let time pass: copies whose time has come are put into the queue, in the order of their times."""
        later = sorted(((wait - time, message) for wait, message in self.waiting), key=lambda each: each[0])
        self.ready += [message for wait, message in later if wait <= NO_TIME]
        self.waiting = [each for each in later if each[0] > NO_TIME]


class MemoryChannel:
    """The part of a channel that a consumer uses.

    Args:
        loses_acks: the first acknowledgement is lost with the connection.
    """

    def __init__(self, queue: MemoryQueue, *, loses_acks: bool) -> None:
        self.on_consumer_cancel_callbacks: set[Callable[..., object]] = set()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsettled: dict[int, QueuedMessage] = {}
        self._has_delivered = False
        self._queue = queue
        self._loses_acks = loses_acks

    @property
    def is_settled(self) -> bool:
        """Whether all was delivered, and is acknowledged."""
        return self._has_delivered and not self._unsettled

    @property
    def unsettled(self) -> list[tuple[str, str]]:
        """Return the type and the id of each message that was delivered and is not acknowledged."""
        properties = [message.header.properties for message in self._unsettled.values()]
        return [(each.message_type or "", each.message_id or "") for each in properties]

    @property
    def is_closed(self) -> bool:
        return self._closed.done()

    @property
    def closing(self) -> asyncio.Future[None]:
        """Return a future that ends with the channel; who waits may cancel it."""
        return asyncio.shield(self._closed)

    async def basic_qos(self, **_: Any) -> None:
        """Do nothing: all that is ready is delivered at once, also beyond the prefetch."""

    async def basic_consume(self, _queue: str, deliver: Deliver, **_: Any) -> Basic.ConsumeOk:
        messages, self._queue.ready = self._queue.ready, []
        self._unsettled = dict(enumerate(messages, 1))
        for tag, message in self._unsettled.copy().items():
            await deliver(message.delivered(tag))
        self._has_delivered = True
        return Basic.ConsumeOk("harness")

    async def basic_ack(self, tag: int, *, multiple: bool = False, **_: Any) -> None:
        if self._loses_acks:
            await self.close()
        if not self.is_closed:
            settled = [each for each in self._unsettled if each <= tag] if multiple else [tag]
            for each in settled:
                self._unsettled.pop(each, None)

    async def basic_cancel(self, _tag: str) -> None:
        """Do nothing: all was delivered at the beginning."""

    async def close(self) -> None:
        """End the channel: what is unsettled comes again."""
        if not self.is_closed:
            self._closed.set_result(None)
            again = [
                QueuedMessage(each.exchange, each.routing_key, each.header, each.body, redelivered=True)
                for each in self._unsettled.values()
            ]
            self._queue.ready = [*again, *self._queue.ready]


def written_of(message: DeliveredMessage | QueuedMessage) -> Written:
    """Return the event of a message, as a relay has sent it."""
    properties = message.header.properties
    headers: dict[str, Any] = dict(properties.headers or {})
    is_json = (properties.content_type or "").endswith("json")
    return Written(
        event_type=properties.message_type or "",
        key=(str(headers.get("x-aggregate-type")), headers.get("x-aggregate-id")),
        headers={name: value for name, value in headers.items() if not name.startswith("x-")},
        message_id=UUID(properties.message_id),
        exchange=message.exchange,
        routing_key=message.routing_key,
        content_type=properties.content_type,
        available_at=None,
        body=message.body.decode() if is_json else message.body,
        state=None,
    )


def relays_encoder() -> Encoder:
    """Return the encoder of a relay that has no routes."""
    settings = BrokerSettings()
    return Encoder(CHANNEL, 0, Router((), settings.exchange), MessageIdentity(settings.app_id.encode(), NO_LIMIT))


def message_of(event: Written, number: int, encoder: Encoder) -> QueuedMessage:
    """Return the message that a relay makes of a row, with this id.

    Raises:
        UnsendableError: a relay would park the row.
    """
    row = _row(number, event)
    encoded = encoder.encode([row], ())
    for reason in encoded.refused.values():
        raise UnsendableError(reason)
    address = encoder.router.address(row)
    return QueuedMessage(address.exchange.decode(), address.routing_key.decode(), _header(encoded.frames), row.body)


def _header(frames: bytes) -> ContentHeader:
    """Return the header out of the frames of a message: the second one."""
    at = 0
    for _ in ("method", "header"):
        _, _, size = FRAME_START.unpack_from(frames, at)
        begin, at = at + FRAME_START.size, at + FRAME_START.size + size + len(END)
    return decode_header(frames[begin : begin + size])


def _row(number: int, event: Written) -> Row:
    aggregate_type, aggregate_id = event.key
    now = datetime.now(UTC).timestamp() - POSTGRES_EPOCH
    return Row(
        lane=0,
        id=number,
        message_id=str(event.message_id).encode(),
        aggregate_type=aggregate_type.encode(),
        aggregate_id=_encoded(aggregate_id),
        event_type=event.event_type.encode(),
        exchange=_encoded(event.exchange),
        routing_key=_encoded(event.routing_key),
        content_type=_encoded(event.content_type),
        headers=json.dumps(dict(event.headers)).encode() if event.headers else None,
        traceparent=None,
        tracestate=None,
        payload=event.body.encode() if isinstance(event.body, str) else None,
        payload_bytes=event.body if isinstance(event.body, bytes) else None,
        created_at=int(now * 1_000_000),
        attempts=0,
        backoff_ms=0,
        excess=None,
        cost=0,
    )


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
