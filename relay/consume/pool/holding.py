"""A partition in our hands: from when we are told that it is ours until nothing of it is left with us."""

import asyncio
from time import monotonic

from relay.backoff import wait_for_event
from relay.consume.apply.fence import Fence
from relay.consume.apply.handlers import call_in_thread, in_own_task
from relay.consume.apply.partition_state import PartitionState
from relay.consume.channel import LOST, close, consume, wait_for_first
from relay.consume.pool.database_contact import Touch
from relay.consume.pool.member_connection import Link
from relay.consume.pool.policy import Hook, Partition, PoolPolicy
from relay.consume.setup import Setup
from relay.errors import BrokerUnavailableError, ConfigurationError, QueueMissingError
from relay.logger import get_logger

log = get_logger("relay.consume")


STUCK_INTERVAL = 0.1  # seconds between two looks at what a former holder left behind
STUCK_PATIENCE = 60.0  # seconds until which the broker has noticed that he is gone


class Holding:
    """Consumes one partition.

    Args:
        link: the member's connection.
        touch: whether the database hears the member.
        taken_from: the former holder, when it was gone.
        consumed: set once the member has consumed any partition.
    Attributes:
        refusal: why the broker lets the member consume no partition: `run` has returned for it.
    """

    def __init__(
        self,
        setup: Setup,
        fence: Fence,
        *,
        policy: PoolPolicy,
        link: Link,
        touch: Touch,
        taken_from: str | None,
        consumed: asyncio.Event,
    ) -> None:
        self.refusal: ConfigurationError | None = None
        self.fence = fence
        self.setup = setup
        if policy.on_assigned is not None:
            setup.state = PartitionState(lambda: self._tell(policy.on_assigned))
        self.is_consuming = False
        self.hindrance: str | None = f"partition {fence.partition} is not consumed yet"
        self._link = link
        self._touch = touch
        self._policy = policy
        self._taken_from = taken_from
        self._consumed = consumed
        self._partition = Partition(fence.partition, fence.epoch)

    @property
    def is_lost(self) -> bool:
        return self._partition.is_lost

    def stop(self) -> None:
        """Settle what is under way, and let go; `run` returns then."""
        self.setup.stop.set()

    def lose(self) -> None:
        """Somebody else has it: what is under way is rolled back."""
        self._partition.is_lost = True
        self.setup.stop_at_once.set()
        self.setup.stop.set()

    async def run(self) -> None:
        """Hold it until `stop` or `lose`, or until the broker refuses it to a member that has consumed nothing yet."""
        if not await self._assigned():
            return
        watching = asyncio.create_task(self._watch_stuck(), name="pool.stuck") if self._taken_from else None
        failures = 0
        while not self.setup.stop.is_set() and self.refusal is None:
            try:
                await self._consume()
                failures = 0
            except (BrokerUnavailableError, QueueMissingError, ConfigurationError, *LOST) as error:
                failures = 1 if self.is_consuming else failures + 1
                self.hindrance = f"partition {self.fence.partition}: {error}"
                is_serving = self._consumed.is_set() or self.setup.stop.is_set()
                if isinstance(error, ConfigurationError) and not is_serving:
                    self.refusal = error
                    continue
                await wait_for_event(self.setup.stop, self.setup.work.backoff.seconds(failures))
            finally:
                self.is_consuming = False
        if watching is not None:
            watching.cancel()
        await self._tell(self._policy.on_revoked)

    async def _consume(self) -> None:
        if self._touch.lost.is_set():
            self.hindrance = f"partition {self.fence.partition}: the database answers no check-in"
            await wait_for_first(self._touch.kept.wait(), self.setup.stop.wait())
        if self.setup.stop.is_set():
            return
        channel = await self._link.channel()
        try:
            await consume(self.setup, channel, self._tell_ready, cut_off=self._touch.lost)
        finally:
            await close(channel)  # also where it did not come to consuming

    def _tell_ready(self) -> None:
        self.is_consuming, self.hindrance = True, None
        self._consumed.set()

    async def _assigned(self) -> bool:
        """Load the state, however often that takes. Return whether it was loaded before we are to let go."""
        failures = 0
        while not self.setup.stop.is_set():
            if await self._tell(self._policy.on_assigned):
                return True
            failures += 1
            self.hindrance = f"partition {self.fence.partition}: on_assigned fails"
            await wait_for_event(self.setup.stop, self.setup.work.backoff.seconds(failures))
        return False

    async def _tell(self, hook: Hook | None) -> bool:
        if hook is None:
            return True
        try:
            # In a thread: a member whose event loop stands still is taken for dead. An async one only begins there.
            await in_own_task(call_in_thread(hook, self._partition))
        except Exception as error:  # the user's code may raise anything, and the other partitions must go on
            log.error(
                "pool.hook_failed",
                partition=self.fence.partition,
                epoch=self.fence.epoch,
                error=str(error),
                exc_info=True,
            )
            return False
        return True

    async def _watch_stuck(self) -> None:
        """Tell when what was there when a former holder was gone is settled, if there was anything."""
        began, counters = monotonic(), self.setup.counters
        while not counters.deliveries:  # the broker gives us nothing before it has taken back what he had in hand
            if monotonic() - began > STUCK_PATIENCE:
                return
            await asyncio.sleep(STUCK_INTERVAL)
        stuck = counters.deliveries + (await self._link.ready_count(self.setup.queue) or 0)
        while counters.acknowledged < stuck:  # noqa: ASYNC110  # an event would cost each acknowledgement something
            await asyncio.sleep(STUCK_INTERVAL)
        log.info(
            "pool.stuck_drained",
            partition=self.fence.partition,
            epoch=self.fence.epoch,
            taken_from=self._taken_from,
            messages=stuck,
            seconds=round(monotonic() - began, 3),
        )
