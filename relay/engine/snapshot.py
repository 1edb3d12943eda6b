"""What a node counts and knows of itself, for its metrics and its status."""

from collections.abc import Mapping
from dataclasses import dataclass

from relay.engine.row import Outcome
from relay.observe.histogram import Histogram

# From half a millisecond, the fastest confirm of a broker beside us, to the default of broker.confirm_timeout.
CONFIRM_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# From what a woken relay needs to what an outage of hours leaves behind.
DELIVERY_BOUNDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)


class Delivered:
    """The rows that a node has delivered since its start, over all its sessions: confirmed by the broker and marked.

    Attributes:
        total: rows, as the marker counts them.
        times: see `NodeSnapshot.delivery_times`.
    """

    def __init__(self) -> None:
        self.total = 0
        self.times = Histogram(DELIVERY_BOUNDS)

    def add(self, rows: int) -> None:
        """Count marked rows."""
        self.total += rows


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A node at one moment; what is counted is counted since its start."""

    ready: bool
    stalled: bool
    lanes: int  # held
    in_flight: int
    published: int
    failures: Mapping[Outcome, int]
    confirm_times: Histogram  # seconds from the write to the confirm
    delivery_times: Histogram  # seconds from the writer's transaction to the mark
    sweep_finds: int
    database_losses: Mapping[str, int]  # by reason
    broker_losses: Mapping[str, int]
    blocked_seconds: float
    refused_seconds: Mapping[str, float]  # by end; 0 while it does not refuse us
