"""A row as a CloudEvent 1.0: its attributes are headers (binary), or its body is a JSON envelope (structured).

Our own properties and headers stay on either. relay/consume/cloudevents.py takes the envelope off again: it relies on
`data` being the last member, and on the payload standing there byte for byte.
"""

import re
from base64 import b64encode
from datetime import UTC, datetime

import orjson

from relay.config.settings import CloudEvents
from relay.engine.row import Row
from relay.engine.send.message import POSTGRES_EPOCH, MessageIdentity, UnsendableError, content_type, unix_time
from relay.outbox.declared import VERSION

ENVELOPE = b"application/cloudevents+json"
EVENT_TYPES = b"application/cloudevents"  # with these a consumer reads the body as an envelope
# Of all bindings of CloudEvents to RabbitMQ and AMQP, lower case: a writer's header of such a name could contradict.
PREFIXES = ("ce-", "cloudevents_", "cloudevents:")
MEDIA_TYPE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*;[ -~\t]*)?")
JSON_TYPE = re.compile(rb"[^/;]+/(?:[^;]+\+)?json[ \t]*(?:;.*)?", re.IGNORECASE)
# Control characters and Unicode's noncharacters; a text of PostgreSQL has no surrogates.
FORBIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)


def check_kind(row: Row) -> None:
    """Raise UnsendableError when no row of this type and content type can be a CloudEvent."""
    _text("event_type", row.event_type)
    declared = content_type(row)
    if not MEDIA_TYPE.fullmatch(declared):
        raise UnsendableError(f"content_type {declared.decode()!r} is no media type, and CloudEvents need one")
    if declared.lower().startswith(EVENT_TYPES):
        raise UnsendableError(
            f"content_type {declared.decode()!r} says that the payload is a CloudEvent already; its route makes one"
        )


def attributes(row: Row, source: str, version: object) -> dict[str, str]:
    """Return the attributes of the row's event but `datacontenttype`.

    Args:
        version: the writer's header `x-event-version`, if there is one.
    Raises:
        UnsendableError: a CloudEvent may not have a character of the key or the version.
    """
    found = {
        "specversion": "1.0",
        "id": row.message_id.decode(),
        "source": source,
        "type": row.event_type.decode(),
        "time": _time(row),
    }
    if row.aggregate_id is not None:
        key = f"{_text('aggregate_type', row.aggregate_type)}/{_text('aggregate_id', row.aggregate_id)}"
        found |= {"subject": key, "partitionkey": key}
    if version is not None and (text := _text(f"header {VERSION}", str(version))):
        found["eventversion"] = text
    return found


def own_headers(headers: dict[str, object]) -> dict[str, object]:
    """Return the writer's headers without those that look like attributes of a CloudEvent."""
    return {name: value for name, value in headers.items() if not name.lower().startswith(PREFIXES)}


def envelope(row: Row, found: dict[str, str], identity: MessageIdentity) -> bytes:
    """Return the body of a structured event.

    A payload of JSON, by its column and its content type, stands in `data` as it is; any other in `data_base64`.

    Raises:
        UnsendableError: it is larger than a message may be.
    """
    declared = content_type(row)
    front = orjson.dumps(found | {"datacontenttype": declared.decode()})[:-1]
    is_json = row.payload is not None and JSON_TYPE.fullmatch(declared) is not None
    begin, body, end = (b',"data":', row.body, b"}") if is_json else (b',"data_base64":"', row.body, b'"}')
    size = len(front) + len(begin) + (len(body) if is_json else (len(body) + 2) // 3 * 4) + len(end)
    if size > identity.max_message_bytes:
        raise UnsendableError(
            f"{size} bytes, as the CloudEvents envelope of {len(body)}, are more than max_message_bytes"
            f' ({identity.max_message_bytes}); a route with cloudevents = "{CloudEvents.BINARY}" has no envelope'
        )
    return b"".join((front, begin, body if is_json else b64encode(body), end))


def _time(row: Row) -> str:
    """Return the moment of the message's timestamp, with the microseconds unless the timestamp is cut to a limit."""
    seconds, rest = divmod(row.created_at, 1_000_000)
    timestamp = unix_time(row)
    written = datetime.fromtimestamp(timestamp, UTC)
    if timestamp == seconds + POSTGRES_EPOCH:
        written = written.replace(microsecond=rest)
    return written.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _text(what: str, value: bytes | str) -> str:
    """Return a text as an attribute may have it."""
    text = value if isinstance(value, str) else value.decode()
    if (found := FORBIDDEN.search(text)) is not None:
        raise UnsendableError(f"{what} has the character U+{ord(found[0]):04X}, which CloudEvents forbid")
    return text
