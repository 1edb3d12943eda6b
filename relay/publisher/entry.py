"""An event on its way: the row for the buffer, and the row for the broker."""

import asyncio
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Self

import orjson

from relay.engine import row as engine
from relay.engine.send.message import POSTGRES_EPOCH
from relay.errors import NotAcceptedError
from relay.outbox.events import Event
from relay.outbox.row import NewRow, row_of
from relay.outbox.trace import current_trace_context
from relay.publisher.lane import lane_of

# The ids of the table are above zero. `x-outbox-id` has one of these in place of a row's id. No row of the table has
# such an id, and no two messages in flight have the same.
IDS = count(-1, -1)


@dataclass(slots=True, eq=False)
class Unaccepted:
    """An event that was published and is not yet accepted.

    `accepted` is resolved by the broker's confirm or the buffer's commit.
    """

    written: NewRow
    row: engine.Row
    accepted: asyncio.Future[None]
    sent_at: float = field(default=0.0, init=False)  # loop time

    @classmethod
    def of(cls, event: Event, max_payload_bytes: int, written_as: bytes = b"") -> Self:
        """Return the entry of a checked event, with the current time; raises EventError.

        Args:
            written_as: the role that would write its row; empty if the buffer is no table.
        """
        written = row_of(event, current_trace_context(), max_payload_bytes)
        return cls(written, engine_row(written, now(), written_as), asyncio.get_running_loop().create_future())

    def accept(self) -> None:
        if not self.accepted.done():  # it is done already when the caller was cancelled
            self.accepted.set_result(None)

    def refuse(self, reason: str) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(NotAcceptedError(reason))


def now() -> int:
    """Return the current time as the table has it: microseconds since 2000-01-01 UTC."""
    return time.time_ns() // 1000 - POSTGRES_EPOCH * 1_000_000


def engine_row(written: NewRow, accepted_at: int, written_as: bytes = b"") -> engine.Row:
    """Return the row as the relay would read it from the table; `accepted_at` is a time in the form of `now`."""
    id_ = next(IDS)
    aggregate_type = written.aggregate_type.encode()
    aggregate_id = _bytes(written.aggregate_id)
    trace: dict[str, str] = orjson.loads(written.trace_context) if written.trace_context is not None else {}
    return engine.Row(
        lane=id_ & 15 if aggregate_id is None else lane_of(aggregate_type, aggregate_id),
        id=id_,
        message_id=str(written.message_id).encode(),
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        event_type=written.event_type.encode(),
        exchange=_bytes(written.exchange),
        routing_key=_bytes(written.routing_key),
        content_type=_bytes(written.content_type),
        headers=_bytes(written.headers),
        traceparent=_bytes(trace.get("traceparent")),
        tracestate=_bytes(trace.get("tracestate")),
        payload=_bytes(written.payload),
        payload_bytes=written.payload_bytes,
        created_at=accepted_at,
        attempts=0,
        backoff_ms=0,
        excess=None,
        cost=0,
        written_as=written_as,
    )


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
