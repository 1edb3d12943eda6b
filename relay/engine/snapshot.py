"""The counters and the state of a node, for its metrics and its status."""

from collections.abc import Mapping
from dataclasses import dataclass

from relay.config.settings import Unroutable
from relay.engine.row import Outcome
from relay.observe.histogram import Histogram

# From half a millisecond, the fastest confirm of a broker on the same host, to the default of broker.confirm_timeout.
CONFIRM_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node at one moment; it counts since its start."""

    ready: bool
    stalled: bool
    lanes: int  # held
    in_flight: int
    published: int
    failures: Mapping[Outcome, int]
    unroutable: Mapping[Unroutable, int]  # rows for which no queue was bound
    confirm_times: Histogram  # seconds from the write to the confirm
    delivery_times: Histogram  # seconds from the writer's transaction to the mark
    sweep_finds: int
    database_losses: Mapping[str, int]  # by reason
    broker_losses: Mapping[str, int]
    blocked_seconds: float
    refused_seconds: Mapping[str, float]  # by end; 0 while it refuses no connection
