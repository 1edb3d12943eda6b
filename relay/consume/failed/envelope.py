"""The properties and headers of a message when it leaves this consumer for a queue or a table, and when it comes back.

A copy is the same message: body, message_id, type, timestamp and headers. Added headers say what happened, for the
operator, and how often, for the consumer. Headers that would make the broker act on the copy are left out.

A header frame cannot be split, and the broker closes a connection that sends a frame that is too large. When the header
of a copy does not fit, it is folded: the copy carries it in front of the body.

Any publisher can write the headers of a copy. The consumer trusts them only in messages that came the way copies come
(`is_copy`), and removes them from all others.
"""

import socket
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.consume.apply.fence import EPOCH, PARTITION
from relay.consume.classify import Failure, History
from relay.servers.rabbitmq.content_header import UndecodableError, decode_own

Changed = TypeVar("Changed", Basic.Deliver, Basic.Properties)

PERSISTENT = 2
MOST_ATTEMPTS = 2**31 - 2  # one more still fits into the table's column
ATTEMPTS = "x-retry-attempts"
FIRST_FAILURE, LAST_FAILURE = "x-first-failure", "x-last-failure"
EXCEPTION, EXCEPTION_WORDS = "x-exception", "x-exception-message"
ORIGINAL_EXCHANGE, ORIGINAL_ROUTING_KEY = "x-original-exchange", "x-original-routing-key"
DEAD_REASON, DEAD_ATTEMPTS = "x-dead-reason", "x-dead-attempts"
CONSUMER, HOST = "x-consumer", "x-host"

DEAD_SUFFIX = ".dead"  # added to a queue's name for its dead letters
FOLDED = "x-folded-header"  # how many bytes of the body are the header
FRAME_SPARE = 64  # bytes for the rest of the header's frame, and for a message_id that the library adds
MOST_FOLDED = 2**20  # bytes: a frame in base64, and its texts, whose escapes may be four times as long

OF_FAILURES = frozenset(
    {ATTEMPTS, FIRST_FAILURE, LAST_FAILURE, EXCEPTION, EXCEPTION_WORDS, DEAD_REASON, DEAD_ATTEMPTS, CONSUMER, HOST}
)

# Headers that a consumer or a command acts on.
OF_COPIES = frozenset({ATTEMPTS, ORIGINAL_EXCHANGE, ORIGINAL_ROUTING_KEY, PARTITION, EPOCH, FOLDED})

# The broker routes by CC and BCC. Because of x-death, RabbitMQ 3 drops an expired message that has been in the target
# queue before. The broker writes the others itself.
THE_BROKERS = frozenset(
    {"CC", "BCC", "x-death", "x-delivery-count", "x-acquired-count"}
    | {f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason")}
)


def is_copy(delivered: DeliveredMessage, queue: str) -> bool:
    """Whether a message came into this queue as copies come: through the default exchange, and through no other before.

    The broker's delivery names the last exchange. A message that died in another queue may come through the default
    exchange, too. The broker puts the last death in front of deaths that a client of RabbitMQ 3 may have written. A
    client that may write to the default exchange can forge copies (docs/broker.md). The relay leaves these headers out
    of rows.
    """
    if (delivered.exchange, delivered.routing_key) != ("", queue):
        return False
    deaths = (delivered.header.properties.headers or {}).get("x-death")
    if not isinstance(deaths, list) or not deaths or not isinstance(deaths[0], dict):
        return True
    last, consumed = deaths[0], queue.removesuffix(DEAD_SUFFIX)
    died_in = str(last.get("queue"))
    is_ours = died_in == consumed or died_in.startswith(f"{consumed}.")
    return is_ours and (last.get("exchange"), last.get("routing-keys")) == ("", [died_in])


def restored(came: DeliveredMessage, queue: str) -> DeliveredMessage:
    """Return a message that comes back with its first exchange and routing key, which its way back has changed."""
    if not is_copy(came, queue):
        return _without(came, OF_COPIES)
    delivered = unfolded(came)
    headers = delivered.header.properties.headers or {}
    if ORIGINAL_EXCHANGE not in headers or not isinstance(delivered.delivery, Basic.Deliver):
        return delivered
    first = _changed(
        delivered.delivery,
        exchange=str(headers[ORIGINAL_EXCHANGE]),
        routing_key=str(headers.get(ORIGINAL_ROUTING_KEY, "")),
    )
    return replace(delivered, delivery=first)


def restored_letter(came: DeliveredMessage, queue: str) -> DeliveredMessage:
    """Return a dead letter as it was before it was folded. A message that is no copy loses the headers of failures."""
    return unfolded(came) if is_copy(came, queue) else _without(came, OF_COPIES | OF_FAILURES)


def history_of(delivered: DeliveredMessage) -> History:
    """Return the failed attempts from the headers of a retry copy; a dead letter that was sent back begins at zero."""
    headers = delivered.header.properties.headers or {}
    attempts = headers.get(ATTEMPTS)
    if not isinstance(attempts, int) or not 0 <= attempts <= MOST_ATTEMPTS:
        return History()
    try:
        return History(attempts, datetime.fromisoformat(str(headers.get(FIRST_FAILURE))).astimezone(UTC))
    except (ValueError, OverflowError):  # it is no date, or before the earliest one that Python has
        return History(attempts)


def retry_copy(delivered: DeliveredMessage, failure: Failure) -> Basic.Properties:
    """Return the properties of the copy for a retry queue; it comes back after `failure.wait`."""
    return _copy(
        delivered, {ATTEMPTS: failure.attempts, **_told(delivered, failure)}, expiration=str(round(failure.wait * 1000))
    )


def dead_letter(delivered: DeliveredMessage, failure: Failure, consumer_name: str) -> Basic.Properties:
    """Return the properties of the copy for the dead letters."""
    headers = {
        DEAD_REASON: str(failure.reason),
        DEAD_ATTEMPTS: failure.attempts,
        CONSUMER: consumer_name,
        HOST: socket.gethostname(),
        **_told(delivered, failure),
    }
    return _copy(delivered, headers, expiration=None)


def sent_back(delivered: DeliveredMessage) -> Basic.Properties:
    """Return the properties with which a dead letter goes back to its queue, without the headers of its failures."""
    told = {name: value for name, value in given_up(delivered).items() if name not in OF_FAILURES}
    return _copy(delivered, told, expiration=None)


def renewed(delivered: DeliveredMessage) -> Basic.Properties:
    """Return the properties with which a dead letter is published again as one: the broker counts from zero again."""
    return _copy(delivered, given_up(delivered), without=frozenset(), expiration=None)


def given_up(delivered: DeliveredMessage) -> dict[str, str]:
    """Return the headers of a dead letter for a message that the broker, not a consumer, has dead-lettered.

    They come from the broker's x-death. Values that it lacks, and headers that the message has, are left out.
    """
    headers = delivered.header.properties.headers or {}
    deaths = headers.get("x-death")
    if DEAD_REASON in headers or not isinstance(deaths, list) or not deaths or not isinstance(deaths[0], dict):
        return {}
    last = deaths[0]
    time, keys = last.get("time"), last.get("routing-keys")
    told = {
        DEAD_REASON: last.get("reason"),
        LAST_FAILURE: time.isoformat() if isinstance(time, datetime) else None,
        ORIGINAL_EXCHANGE: last.get("exchange"),
        ORIGINAL_ROUTING_KEY: keys[0] if isinstance(keys, list) and keys else None,
    }
    return {name: str(value) for name, value in told.items() if value is not None and name not in headers}


def pack(delivered: DeliveredMessage) -> bytes:
    """Return the properties in AMQP's encoding: only this form keeps all of AMQP's types."""
    return delivered.header.marshal()


def unpack(packed: bytes, body: bytes, *, exchange: str, routing_key: str) -> DeliveredMessage:
    """Return a packed message as a redelivery that belongs to no channel."""
    header = decode_own(packed)
    came = _changed(Basic.Deliver("", 0, redelivered=True), exchange=exchange, routing_key=routing_key)
    return DeliveredMessage(delivery=came, header=header, body=body, channel=None)  # type: ignore[arg-type]


def folded(properties: Basic.Properties, body: bytes, frame_max: int) -> tuple[Basic.Properties, bytes]:
    """Return properties and a body whose header fits into a frame of `frame_max` bytes (0: of any size)."""
    header = ContentHeader(properties=properties).marshal()
    if not 0 < frame_max < len(header) + FRAME_SPARE:
        return properties, body
    # It has no type: a consumer of an earlier release has no handler for that, and keeps the message as a dead letter.
    outer = Basic.Properties(
        message_id=properties.message_id,
        expiration=properties.expiration,
        delivery_mode=PERSISTENT,
        headers={FOLDED: len(header)},
    )
    return outer, header + body


def unfolded(delivered: DeliveredMessage) -> DeliveredMessage:
    """Return a folded message as it was before, with the headers that the broker has added to the folded one."""
    outer = delivered.header.properties
    size = (outer.headers or {}).get(FOLDED)
    if not isinstance(size, int) or not 0 < size <= min(len(delivered.body), MOST_FOLDED):
        return delivered
    try:
        header = decode_own(delivered.body[:size])
    except UndecodableError:  # another program uses a header of this name
        return delivered
    inner, added = header.properties, {name: value for name, value in (outer.headers or {}).items() if name != FOLDED}
    inner.headers = {**(inner.headers or {}), **added}
    inner.message_id = inner.message_id or outer.message_id  # the library adds one to a message that has no id
    return replace(delivered, header=header, body=delivered.body[size:])


def _without(delivered: DeliveredMessage, names: frozenset[str]) -> DeliveredMessage:
    """Return a message without these headers."""
    headers = delivered.header.properties.headers or {}
    if not headers.keys() & names:
        return delivered
    header = copy(delivered.header)
    header.properties = _changed(
        header.properties, headers={name: value for name, value in headers.items() if name not in names}
    )
    return replace(delivered, header=header)


def _told(delivered: DeliveredMessage, failure: Failure) -> dict[str, Any]:
    return {
        FIRST_FAILURE: failure.first_failed_at.isoformat(timespec="milliseconds"),
        LAST_FAILURE: failure.failed_at.isoformat(timespec="milliseconds"),
        EXCEPTION: failure.exception,
        EXCEPTION_WORDS: failure.words,
        ORIGINAL_EXCHANGE: delivered.exchange or "",
        ORIGINAL_ROUTING_KEY: delivered.routing_key or "",
    }


def _copy(
    delivered: DeliveredMessage,
    told: Mapping[str, Any],
    *,
    without: frozenset[str] = OF_FAILURES,
    expiration: str | None,
) -> Basic.Properties:
    properties = delivered.header.properties
    kept = {
        name: value
        for name, value in (properties.headers or {}).items()
        if name not in THE_BROKERS and name not in without
    }
    # The broker would close the channel for a user_id that is not the user of the connection.
    return _changed(properties, headers={**kept, **told}, expiration=expiration, user_id=None, delivery_mode=PERSISTENT)


def _changed(method: Changed, **changes: Any) -> Changed:
    """Return a copy with these values, unchecked.

    The library's constructors refuse some values that RabbitMQ takes and delivers. Examples are the name of an exchange
    with an accent or more than 127 characters, and a cluster_id.
    """
    changed = copy(method)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed
