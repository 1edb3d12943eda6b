"""What a consumer knows of itself, for whoever asks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relay.consume.counters import Counters


@dataclass(frozen=True, slots=True)
class Figures:
    """A consumer at one moment."""

    consumer: str  # the name of its inbox
    queue: str
    ready: bool
    stalled: bool
    paused: bool
    counters: Counters  # a copy
    steps: Sequence[float]  # of its retries, in seconds
    refused_seconds: Mapping[str, float]  # by end; 0 while it does not refuse us
