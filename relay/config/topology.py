"""What `[topology]` lists: the exchanges, queues and bindings that are declared at a deployment, never on a reconnect.

Each model gives its AMQP arguments. What is `None` is not among them: a policy of the broker decides.
"""

import re
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from relay.config.durations import seconds_of
from relay.config.sections import Section, ShortString, Takes

# RabbitMQ takes other names, too, and exchanges of up to 255 bytes. The AMQP library cannot declare these.
NAME = re.compile(r"[A-Za-z0-9\-_.:@#,/+ ]+")
RESERVED = "amq."
MAX_INTEGER = 2**63 - 1
MAX_MILLISECONDS = 2**32 - 1  # RabbitMQ's longest time

QUEUE_ARGUMENTS = {
    "type": "x-queue-type",
    "dead_letter_exchange": "x-dead-letter-exchange",
    "dead_letter_routing_key": "x-dead-letter-routing-key",
    "delivery_limit": "x-delivery-limit",
    "max_length": "x-max-length",
    "max_length_bytes": "x-max-length-bytes",
    "overflow": "x-overflow",
    "message_ttl": "x-message-ttl",
    "single_active_consumer": "x-single-active-consumer",
}
STREAM_TAKES = {"type", "max_length_bytes"}  # of the above


class ExchangeType(StrEnum):
    """How an exchange finds the queues for a message."""

    TOPIC = "topic"
    DIRECT = "direct"
    FANOUT = "fanout"
    HEADERS = "headers"


class QueueType(StrEnum):
    """How a queue keeps its messages."""

    QUORUM = "quorum"
    CLASSIC = "classic"
    STREAM = "stream"


class Overflow(StrEnum):
    """What a full queue does."""

    DROP_HEAD = "drop-head"  # its oldest message is dropped or dead-lettered
    REJECT_PUBLISH = "reject-publish"  # new ones are refused: the relay keeps them


def _name(longest: int) -> AfterValidator:
    def check(name: str) -> str:
        if not NAME.fullmatch(name) or len(name) > longest:
            raise ValueError
        return name

    return AfterValidator(check)


def _unreserved(name: str) -> str:
    if name.startswith(RESERVED):
        raise ValueError(f"RabbitMQ keeps the names that begin with {RESERVED} for itself")
    return name


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    if not all(0 < len(name.encode()) <= 128 and _is_field(value) for name, value in arguments.items()):
        raise ValueError
    return arguments


def _is_field(value: object) -> bool:
    match value:
        case bool() | str():
            return True
        case int():
            return -MAX_INTEGER <= value <= MAX_INTEGER
        case list():
            return all(_is_field(each) for each in value)
        case dict():
            return all(isinstance(name, str) and _is_field(each) for name, each in value.items())
        case _:  # no fractions: the AMQP library would cut them to 32 bits
            return False


CHARACTERS = "letters, digits, spaces and - _ . : @ # , / +"
ExchangeName = Annotated[str, _name(127), Takes(f"a name of 1 to 127 {CHARACTERS}")]
QueueName = Annotated[str, _name(255), Takes(f"a name of 1 to 255 {CHARACTERS}")]
Arguments = Annotated[
    dict[str, Any],
    AfterValidator(_arguments),
    Takes("a table of AMQP arguments: text, whole numbers, true or false, lists and tables of them"),
]
Count = Annotated[int | None, Field(ge=0, le=MAX_INTEGER), Takes("a whole number, at least 0")]
Ttl = Annotated[
    float | None,
    BeforeValidator(seconds_of),
    Field(ge=0.001, le=MAX_MILLISECONDS / 1000),
    Takes('seconds, from 0.001 to 4294967.295, or as in "2h"'),
]


class Exchange(Section):
    """`[[topology.exchanges]]`."""

    name: Annotated[ExchangeName, AfterValidator(_unreserved)]
    """not `amq.*`"""
    type: ExchangeType = ExchangeType.TOPIC
    """how it finds the queues"""
    durable: bool = True
    """survives a restart of the broker"""
    alternate_exchange: ShortString | None = None
    """takes what this one has no queue for"""
    arguments: Arguments = Field(default_factory=dict)
    """others than those above"""

    @field_validator("arguments")
    @classmethod
    def _no_second_word(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        return _said_once(arguments, {"alternate_exchange": "alternate-exchange"})

    def amqp_arguments(self) -> dict[str, Any]:
        """Return what it is declared with."""
        alternate = {} if self.alternate_exchange is None else {"alternate-exchange": self.alternate_exchange}
        return alternate | self.arguments


class Queue(Section):
    """`[[topology.queues]]`."""

    name: Annotated[QueueName, AfterValidator(_unreserved)]
    """not `amq.*`"""
    type: QueueType = QueueType.QUORUM
    """always told to the broker"""
    durable: bool = True
    """survives a restart of the broker; false for classic queues only"""
    dead_letter_exchange: ShortString | None = None
    """takes what is rejected, expires or is dropped; `""` is the default exchange"""
    dead_letter_routing_key: ShortString | None = None
    """in place of the message's own"""
    delivery_limit: Count = None
    """a message given back this often is dead-lettered (quorum)"""
    max_length: Count = None
    """messages"""
    max_length_bytes: Count = None
    """bytes of payload"""
    overflow: Overflow | None = None
    """a full queue drops its oldest message (drop-head), or refuses new ones, which the relay keeps (reject-publish)"""
    message_ttl: Ttl = None
    """a message that has waited this long expires"""
    single_active_consumer: bool | None = None
    """one consumer at a time, the others stand by"""
    arguments: Arguments = Field(default_factory=dict)
    """others than those above"""

    @field_validator("durable")
    @classmethod
    def _lasting(cls, durable: bool, info: ValidationInfo) -> bool:
        kind = info.data.get("type")
        if not durable and kind in (QueueType.QUORUM, QueueType.STREAM):
            raise ValueError(f"a {kind} queue is always durable")
        return durable

    @field_validator(*(name for name in QUEUE_ARGUMENTS if name != "type"))
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("type")
        if value is not None and kind is QueueType.STREAM and info.field_name not in STREAM_TAKES:
            raise ValueError("a stream takes no such key")
        if value is not None and kind is QueueType.CLASSIC and info.field_name == "delivery_limit":
            raise ValueError('only a quorum queue has one: type = "quorum"')
        return value

    @field_validator("dead_letter_routing_key")
    @classmethod
    def _with_an_exchange(cls, key: str | None, info: ValidationInfo) -> str | None:
        if key is not None and info.data.get("dead_letter_exchange", "") is None:
            raise ValueError("it needs a dead_letter_exchange, too")
        return key

    @field_validator("arguments")
    @classmethod
    def _no_second_word(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        return _said_once(arguments, QUEUE_ARGUMENTS)

    def amqp_arguments(self) -> dict[str, Any]:
        """Return what it is declared with; times in milliseconds."""
        said = {argument: getattr(self, key) for key, argument in QUEUE_ARGUMENTS.items()}
        if self.message_ttl is not None:
            said["x-message-ttl"] = round(self.message_ttl * 1000)
        return {name: _plain(value) for name, value in said.items() if value is not None} | self.arguments


class Binding(Section):
    """`[[topology.bindings]]`."""

    exchange: ExchangeName
    """where messages come from"""
    queue: Annotated[QueueName | None, AfterValidator(lambda name: name and _unreserved(name))] = None
    """where they go"""
    to_exchange: Annotated[ExchangeName | None, AfterValidator(lambda name: name and _unreserved(name))] = None
    """an exchange in place of `queue`"""
    routing_key: ShortString = ""
    """such as `customer.*`; empty for a fanout or headers exchange"""
    arguments: Arguments = Field(default_factory=dict)
    """for a headers exchange"""

    @model_validator(mode="after")
    def _to_one(self) -> Self:
        if (self.queue is None) == (self.to_exchange is None):
            raise ValueError("it takes a queue or a to_exchange, one of the two")
        return self


class TopologySettings(Section):
    """`[topology]`: what is declared at a deployment."""

    exchanges: tuple[Exchange, ...] = ()
    """as a variable: a JSON list of tables"""
    queues: tuple[Queue, ...] = ()
    """as a variable: a JSON list of tables"""
    bindings: tuple[Binding, ...] = ()
    """as a variable: a JSON list of tables"""

    @field_validator("exchanges", "queues")
    @classmethod
    def _named_once(cls, listed: tuple[Exchange | Queue, ...]) -> tuple[Exchange | Queue, ...]:
        _refuse_repeats(each.name for each in listed)
        return listed

    @field_validator("bindings")
    @classmethod
    def _bound_once(cls, listed: tuple[Binding, ...]) -> tuple[Binding, ...]:
        _refuse_repeats(
            f"{each.exchange} to {each.queue or each.to_exchange} with {each.routing_key!r}"
            + (f" and {sorted(each.arguments.items())}" if each.arguments else "")
            for each in listed
        )
        return listed


def _refuse_repeats(things: Iterable[str]) -> None:
    if repeated := [thing for thing, count in Counter(things).items() if count > 1]:
        raise ValueError(f"listed more than once: {'; '.join(repeated)}")


def _said_once(arguments: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    for key, argument in keys.items():
        if argument in arguments:
            raise ValueError(f"{argument} has its own key, {key}")
    return arguments


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value
