"""What happened in a drill, as observed from outside of the relay: one list, in the order of observation.

The writers record what they wrote and how it ended (billing.py). The recorder records what passed between relay and
broker (recorder.py). The drill records its faults. The watch records readiness and memory (watch.py). All of them,
and a database on this machine, read the same clock.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from uuid import UUID


class Ending(StrEnum):
    """How the transaction of a message ended, as far as its writer knows."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"  # the connection was lost under the COMMIT
    FORGOTTEN = "forgotten"  # a failover lost the transaction, perhaps after its message was delivered


@dataclass(frozen=True, slots=True)
class Record:
    at: float = field(default_factory=time.time, kw_only=True)


@dataclass(frozen=True, slots=True)
class Written(Record):
    """A message that a writer inserted, recorded after its transaction had ended.

    Attributes:
        key: `aggregate_type/aggregate_id`; None without an aggregate id.
        number: its place among the key's messages; None when no order is asked for.
        body: `digest` of the payload.
    """

    message_id: UUID
    key: str | None
    number: int | None
    ending: Ending
    body: str


@dataclass(frozen=True, slots=True)
class Published(Record):
    """A Basic.Publish with its content went on to the broker; the tag is the one that its confirm will carry."""

    connection: int
    channel: int
    tag: int
    outbox_id: int
    message_id: UUID
    body: str
    redelivered: bool
    lane: int = 0
    relay: str = ""  # whose connection it was, where there are several


@dataclass(frozen=True, slots=True)
class Acked(Record):
    connection: int
    channel: int
    tag: int
    multiple: bool


@dataclass(frozen=True, slots=True)
class Nacked(Record):
    connection: int
    channel: int
    tag: int
    multiple: bool


@dataclass(frozen=True, slots=True)
class Returned(Record):
    connection: int
    channel: int
    outbox_id: int
    words: str


@dataclass(frozen=True, slots=True)
class Closed(Record):
    """The end of a channel, or of a connection with all of its channels.

    Attributes:
        channel: None for the connection.
        code: the broker's; 0 if the broker did not close it.
    """

    connection: int
    channel: int | None
    code: int = 0
    words: str = ""


class Reach(StrEnum):
    """Which relays or keys a fault may affect."""

    A_MOMENT = "a moment"  # it is over as soon as it has happened, like a kill or a cut
    SOME = "some"  # some keys, until it is healed
    ALL = "all"  # nothing can be delivered until it is healed


@dataclass(frozen=True, slots=True)
class Injected(Record):
    """A fault that the drill has caused.

    Attributes:
        forgets: the relay lost what it knew of messages in flight, as when it is killed.
        relay: the only one that it hits; all of them when empty.
    """

    what: str
    reach: Reach = Reach.A_MOMENT
    forgets: bool = False
    relay: str = ""


@dataclass(frozen=True, slots=True)
class Healed(Record):
    """The fault of this name is over."""

    what: str


@dataclass(frozen=True, slots=True)
class Probed(Record):
    """An answer of the relay about its readiness."""

    ready: bool
    relay: str = ""


@dataclass(frozen=True, slots=True)
class Owned(Record):
    """The holders of the lanes' locks, as PostgreSQL names them; empty for a relay that has no heartbeat yet."""

    lanes: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Measured(Record):
    """The relay's resident memory, and the age of its oldest open transaction in seconds."""

    resident_bytes: int
    oldest_transaction: float


History = list[Record]


def digest(body: bytes) -> str:
    return sha256(body).hexdigest()
