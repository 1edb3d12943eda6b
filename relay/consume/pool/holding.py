"""A partition that this member holds, from its assignment until it has no message in flight here."""

import asyncio
from enum import Enum, auto
from time import monotonic

from relay.consume.apply.fence import Fence
from relay.consume.apply.handlers import call_in_thread, in_own_task
from relay.consume.apply.partition_state import PartitionState
from relay.consume.channel import close, consume, wait_for_first
from relay.consume.classify import exc_info_of, first_line, name_of
from relay.consume.pool.database_contact import DatabaseContact
from relay.consume.pool.member_connection import MemberConnection
from relay.consume.pool.policy import Hook, Partition, PoolPolicy
from relay.consume.setup import Setup
from relay.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    DatabaseUnavailableError,
    PublicReason,
    QueueMissingError,
)
from relay.logger import get_logger
from relay.observe.printable import printable
from relay.runtime.backoff import Stopping, raise_if_set, wait_for_event
from relay.runtime.hindrance import Hindrance
from relay.servers.rabbitmq.connection import CHANNEL_LOST, public_reason

log = get_logger("relay.consume")


STUCK_INTERVAL = 0.1  # seconds between two looks at the messages that a former holder left behind
STUCK_PATIENCE = 60.0  # seconds within which the broker notices that the former holder is gone


class HookResult(Enum):
    """The result of a call of a hook, such as `on_assigned`."""

    DONE = auto()  # also when the application gave no hook
    FAILED = auto()


class Holding:
    """Consumes one partition.

    Args:
        connection: the member's connection.
        contact: whether the member's check-ins reach the database.
        taken_from: the former holder, if it was gone before it released the partition.
        consumed: set once the member has consumed any partition.
    Attributes:
        refusal: set when the broker refuses the partition's queue to a member that has consumed nothing yet. `run` has
            returned because of it.
    """

    def __init__(
        self,
        setup: Setup,
        fence: Fence,
        *,
        policy: PoolPolicy,
        connection: MemberConnection,
        contact: DatabaseContact,
        taken_from: str | None,
        consumed: asyncio.Event,
    ) -> None:
        self.refusal: ConfigurationError | None = None
        self.fence = fence
        self.setup = setup
        if policy.on_assigned is not None:
            setup.state = PartitionState(self._load)
        self.is_consuming = False
        self.hindrance: Hindrance | None = Hindrance(
            f"partition {fence.partition} is not consumed yet", PublicReason.NOT_CONSUMED
        )
        self._connection = connection
        self._contact = contact
        self._policy = policy
        self._taken_from = taken_from
        self._consumed = consumed
        self._partition = Partition(fence.partition, fence.epoch)

    @property
    def is_lost(self) -> bool:
        return self._partition.is_lost

    def stop(self) -> None:
        """Settle the messages in flight, and release the partition; then `run` returns."""
        self.setup.stop.set()

    def lose(self) -> None:
        """Stop at once, as another member holds the partition: running transactions are rolled back."""
        self._partition.is_lost = True
        self.setup.stop_at_once.set()
        self.setup.stop.set()

    async def run(self) -> None:
        """Hold the partition until `stop` or `lose`, or until `refusal` is set."""
        try:
            await self._load_first()
        except Stopping:
            return
        watching = asyncio.create_task(self._watch_stuck(), name="pool.stuck") if self._taken_from else None
        try:
            await self._consume_until_told()
        finally:
            if watching is not None:
                watching.cancel()
        await self._call(self._policy.on_revoked)

    async def _consume_until_told(self) -> None:
        failures = 0
        while not self.setup.stop.is_set() and self.refusal is None:
            try:
                await self._consume()
                failures = 0
            except (BrokerUnavailableError, QueueMissingError, ConfigurationError, *CHANNEL_LOST) as error:
                failures = 1 if self.is_consuming else failures + 1
                self._note(str(error), public_reason(error))
                is_serving = self._consumed.is_set() or self.setup.stop.is_set()
                if isinstance(error, ConfigurationError) and not is_serving:
                    self.refusal = error
                    continue
                await wait_for_event(self.setup.stop, self.setup.work.backoff.seconds(failures))
            finally:
                self.is_consuming = False

    async def _consume(self) -> None:
        if self._contact.lost.is_set():
            self._note(PublicReason.NO_CHECK_IN, PublicReason.NO_CHECK_IN)
            await wait_for_first(self._contact.kept.wait(), self.setup.stop.wait())
        if self.setup.stop.is_set():
            return
        channel = await self._connection.channel()
        try:
            await consume(self.setup, channel, self._note_ready, cut_off=self._contact.lost)
        finally:
            await close(channel)  # also if consuming did not begin

    def _note(self, words: str, public: str) -> None:
        self.hindrance = Hindrance(f"partition {self.fence.partition}: {words}", public)

    def _note_ready(self) -> None:
        self.is_consuming, self.hindrance = True, None
        self._consumed.set()

    async def _load_first(self) -> None:
        """Call `on_assigned` until it succeeds. Raises Stopping: the partition must be released before."""
        raise_if_set(self.setup.stop)
        failures = 0
        while await self._call(self._policy.on_assigned) is HookResult.FAILED:
            failures += 1
            self._note(PublicReason.ON_ASSIGNED_FAILS, PublicReason.ON_ASSIGNED_FAILS)
            await wait_for_event(self.setup.stop, self.setup.work.backoff.seconds(failures))
            raise_if_set(self.setup.stop)

    async def _load(self) -> None:
        """Load the state again. Raises DatabaseUnavailableError: the hook has failed."""
        if await self._call(self._policy.on_assigned) is HookResult.FAILED:
            raise DatabaseUnavailableError(
                "on_assigned fails: the state of the partition cannot be loaded", public=PublicReason.ON_ASSIGNED_FAILS
            )

    async def _call(self, hook: Hook | None) -> HookResult:
        if hook is None:
            return HookResult.DONE
        try:
            # In a thread, because a member whose event loop stands still is taken for dead. An async hook only begins
            # there, and runs in the event loop.
            await in_own_task(call_in_thread(hook, self._partition))
        except Exception as error:  # a hook may raise anything, and the other partitions must go on
            words = f"{name_of(error)}: {first_line(error)}"
            log.error(
                "pool.hook_failed",
                partition=self.fence.partition,
                epoch=self.fence.epoch,
                error=words,
                summary=printable(f"partition {self.fence.partition}: {words}"),
                exc_info=exc_info_of(error),
            )
            return HookResult.FAILED
        return HookResult.DONE

    async def _watch_stuck(self) -> None:
        """Log when the messages that a former holder left behind are settled, if there were any."""
        began, counters = monotonic(), self.setup.counters
        while not counters.deliveries:  # the broker first takes back the former holder's messages in flight
            if monotonic() - began > STUCK_PATIENCE:
                return
            await asyncio.sleep(STUCK_INTERVAL)
        stuck = counters.deliveries + (await self._connection.ready_count(self.setup.queue) or 0)
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
