"""The parts that a consumer works with, and those that each partition of a pool has separately."""

import asyncio
from dataclasses import dataclass, field, replace

from relay.config.settings import BrokerSettings
from relay.consume.apply.fence import Fence
from relay.consume.apply.handlers import Handlers
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.apply.partition_state import PartitionState
from relay.consume.classify import Judge
from relay.consume.counters import Counters
from relay.consume.failed.copy_publisher import CopyPublisher
from relay.consume.failed.poison import BegunAttempts
from relay.consume.hindrances import Outages, OverloadGate, StallWatch
from relay.consume.policies import FailurePolicy, WorkPolicy
from relay.runtime.health import Health

AHEAD = 16  # deliveries of a partition that its holder may have waiting, in addition to those it works on


@dataclass(slots=True, eq=False, kw_only=True)
class Setup:
    """The parts of a consumer that outlive a channel."""

    queue: str
    dead_queue: str
    handlers: Handlers
    inbox: Inbox
    broker: BrokerSettings
    failures: FailurePolicy
    work: WorkPolicy
    fence: Fence | None = None  # around the partition that is consumed
    state: PartitionState | None = None  # of that partition
    judge: Judge = field(init=False)
    counters: Counters = field(init=False, default_factory=Counters)
    stop: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    stop_at_once: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    gate: OverloadGate = field(init=False)
    stalls: StallWatch = field(init=False)
    health: Health = field(init=False)
    outages: Outages = field(init=False)
    session: InboxSession = field(init=False)
    begun_attempts: BegunAttempts = field(init=False)
    outgoing: CopyPublisher = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(self.failures)
        self.gate = OverloadGate(self.work.backoff, self.counters)
        self.stalls = StallWatch(self.counters, self.gate, self.work.stall_after)
        self.health = Health(self.work.stall_after)
        self.outages = Outages(self.work.backoff, self.counters, self.health)
        self.session = InboxSession(self.inbox, self.outages)
        self.begun_attempts = BegunAttempts(self.inbox, self.session)
        self.outgoing = CopyPublisher(self.broker, f"outbox-consumer {self.inbox.consumer_name} copies")

    @property
    def prefetch(self) -> int:
        # Only the holder of a partition can work on its messages. So taking more than it works on costs no other.
        ahead = 0 if self.fence is None else AHEAD
        return self.work.workers * self.work.batch_size + ahead

    def of(self, fence: Fence, queue: str) -> "Setup":
        """Return the setup of one partition: separate counters and stop events, and the shared parts of the process."""
        own = replace(self, queue=queue, fence=fence)
        own.gate, own.outages, own.session = self.gate, self.outages, self.session
        own.stalls = StallWatch(own.counters, own.gate, own.work.stall_after)
        own.health = self.health
        own.begun_attempts = BegunAttempts(own.inbox, own.session)
        return own
