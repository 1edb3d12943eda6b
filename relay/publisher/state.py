"""What a publisher reports about itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Where events go that are published now."""

    DIRECT = "direct"  # to the broker
    BUFFERED = "buffered"  # to the buffer: the broker takes no events, or the buffer may hold some of this publisher
    HOLDING = "holding"  # they wait for a moment: the buffer is nearly empty, and nothing may be added to it


@dataclass(frozen=True, slots=True)
class PublisherState:
    """A publisher at one moment; `confirmed` and `buffered` count since its start."""

    mode: Mode
    waiting: int  # events published and not yet accepted
    confirmed: int  # accepted by the broker
    buffered: int  # accepted by the buffer
    reasons: Sequence[str]  # what is wrong: at the broker, at the database, and events that the broker refuses
