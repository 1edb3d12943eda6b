"""What a publisher says of itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Where events go that are published now."""

    DIRECT = "direct"  # to the broker
    BUFFERED = "buffered"  # to the buffer: the broker takes nothing, or something of ours may be in the buffer
    HOLDING = "holding"  # nowhere, for a moment: the buffer is nearly empty, and nothing may be put behind the last


@dataclass(frozen=True, slots=True)
class PublisherState:
    """A publisher at one moment; what is counted is counted since its start."""

    mode: Mode
    waiting: int  # events published and not yet accepted
    confirmed: int  # accepted by the broker
    buffered: int  # accepted by the buffer
    reasons: Sequence[str]  # why it is not all well: the broker, the database, and what the broker refuses
