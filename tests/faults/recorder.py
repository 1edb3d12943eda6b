"""A proxy in front of the broker that records every publish, and the broker's answer, as it passes.

What a fault holds or drops is not recorded, because it did not arrive.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Confirm, Connection
from pamqp.header import ContentHeader

from tests.faults.history import Acked, Closed, History, Nacked, Published, Returned
from tests.support.proxy import FRAME_HEAD, FaultProxy, Way

END = 0xCE


@dataclass(slots=True)
class _Content:
    """A publish or return whose frames have not all come yet."""

    method: Any
    tag: int
    missing: int = 0
    properties: Basic.Properties = field(default_factory=Basic.Properties)
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)


class Recorder(FaultProxy):
    """Forwards as `FaultProxy` does, and writes into `history` what passes. `relay`: the connecting relay's name."""

    def __init__(self, history: History, host: str, port: int, *, relay: str = "") -> None:
        super().__init__(host, port)
        self._relay = relay
        self._history = history
        self._tags: dict[tuple[int, int], int] = {}  # channel -> publishes since it went into confirm mode
        self._contents: dict[tuple[int, int, Way], _Content] = {}

    def passes(self, connection: int, way: Way, data: bytes) -> None:
        if not _is_frame(data):
            return  # the greeting, or what is left of a frame that was cut
        _, number, value = frame.unmarshal(data)
        place = (connection, number)
        match value:
            case Basic.Ack():
                self._history.append(Acked(*place, value.delivery_tag, value.multiple))
            case Basic.Nack():
                self._history.append(Nacked(*place, value.delivery_tag, value.multiple))
            case Confirm.Select():
                self._tags[place] = 0
            case Channel.Close():
                self._history.append(Closed(*place, *_reason(way, value)))
            case Connection.Close():
                self._history.append(Closed(connection, None, *_reason(way, value)))
            case Basic.Publish():
                self._tags[place] = self._tags.get(place, 0) + 1
                self._contents[*place, way] = _Content(value, self._tags[place])
            case Basic.Return():
                self._contents[*place, way] = _Content(value, 0)
            case ContentHeader() | ContentBody() if (*place, way) in self._contents:
                self._take_content(place, way, value)

    def ended(self, connection: int) -> None:
        self._history.append(Closed(connection, None))

    def _take_content(self, place: tuple[int, int], way: Way, part: ContentHeader | ContentBody) -> None:
        content = self._contents[*place, way]
        if isinstance(part, ContentHeader):
            content.missing, content.properties = part.body_size or 0, part.properties
        else:
            content.missing -= len(part.value)
            content.digest.update(part.value)
        if content.missing:
            return
        del self._contents[*place, way]
        headers: dict[str, Any] = content.properties.headers or {}
        if isinstance(content.method, Basic.Publish) and "x-outbox-id" in headers:
            self._history.append(
                Published(
                    *place,
                    content.tag,
                    headers["x-outbox-id"],
                    UUID(content.properties.message_id),
                    content.digest.hexdigest(),
                    bool(headers.get("x-outbox-redelivered")),
                    headers["x-outbox-lane"],
                    self._relay,
                )
            )
        elif isinstance(content.method, Basic.Return) and "x-outbox-id" in headers:
            words = f"{content.method.reply_code} {content.method.reply_text}"
            self._history.append(Returned(*place, headers["x-outbox-id"], words))


def _is_frame(data: bytes) -> bool:
    return (
        not data.startswith(b"AMQP")
        and len(data) > FRAME_HEAD.size
        and data[-1] == END
        and len(data) == FRAME_HEAD.size + FRAME_HEAD.unpack_from(data)[2] + 1
    )


def _reason(way: Way, close: Channel.Close | Connection.Close) -> tuple[int, str]:
    return (close.reply_code or 0, close.reply_text) if way is Way.DOWN else (0, "")
