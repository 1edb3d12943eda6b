"""Apply the messages of some keys, in the order in which they were delivered.

When a handler fails, its transaction is rolled back and its message is tried again here, later and later, for as long
as it takes; what comes behind it of the same key waits, everything else goes on. The message stays unacknowledged, so
it is not lost with this process. It is not handed back to the broker between two tries, because that would let its
successors overtake it, and because RabbitMQ 4 drops a message from a quorum queue when it came back 20 times.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from traceback import format_tb

import structlog

from relay.backoff import backoff, wait_for_event
from relay.consume.inbox import Transactions
from relay.consume.message import Delivery
from relay.errors import DatabaseUnavailableError

log = structlog.get_logger("relay.consume")


@dataclass(slots=True)
class Counters:
    """What this consumer has done since it was made."""

    applied: int = 0  # committed for the first time
    duplicates: int = 0  # were applied before; acknowledged without effect
    failed: int = 0  # tries that a handler failed


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the n-th try: doubling, bounded, and spread so that many do not come at once."""

    initial: float = 0.5
    maximum: float = 30.0

    def seconds(self, attempts: int) -> float:
        return backoff(attempts, self.initial, self.maximum)


@dataclass(slots=True)
class _Held:
    """A message that failed, and behind it what came of its key."""

    deliveries: deque[Delivery]
    attempts: int = 0
    due: float = 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """One transaction at a time, of at most `batch_size` messages."""

    transactions: Transactions
    settle: Callable[[Iterable[int]], None]
    counters: Counters
    batch_size: int
    backoff: Backoff
    _waiting: deque[Delivery] = field(default_factory=deque)
    _held: dict[str, _Held] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False

    def put(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._wake.set()

    def stop(self) -> None:
        """Finish the running transaction and no more; what was not begun stays unacknowledged and comes again."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Work until stopped; being cancelled rolls the running transaction back."""
        try:
            while not self._stopping:
                if (due := self._next_due()) is not None:
                    await self._try_again(due)
                elif batch := self._next_batch():
                    await self._work(batch)
                else:
                    await self._sleep(self._until_next_due())
        finally:
            await self.transactions.close()

    def _next_batch(self) -> list[Delivery]:
        batch: list[Delivery] = []
        while self._waiting and len(batch) < self.batch_size:
            delivery = self._waiting.popleft()
            if (held := self._held.get(delivery.key)) is not None:
                held.deliveries.append(delivery)
            else:
                batch.append(delivery)
        return batch

    async def _work(self, batch: Sequence[Delivery]) -> None:
        try:
            await self._commit(batch)
        except Exception as error:  # a handler may raise anything, and this task must go on with the others
            if len(batch) == 1:
                self._hold(batch[0], error)
            else:
                await self._work_one_by_one(batch)

    async def _work_one_by_one(self, batch: Sequence[Delivery]) -> None:
        """Find who is to blame for a batch that was rolled back; its neighbours are innocent."""
        for delivery in batch:
            if self._stopping:
                return
            if (held := self._held.get(delivery.key)) is not None:
                held.deliveries.append(delivery)
            else:
                await self._work([delivery])

    async def _try_again(self, key: str) -> None:
        held = self._held[key]
        delivery = held.deliveries[0]
        try:
            await self._commit([delivery])
        except Exception as error:  # as in _work
            self._hold(delivery, error)
            return
        if not self._stopping:
            del self._held[key]
            held.deliveries.popleft()
            self._waiting.extendleft(reversed(held.deliveries))  # they came before whatever of the key waits there

    def _hold(self, delivery: Delivery, error: Exception) -> None:
        held = self._held.setdefault(delivery.key, _Held(deque([delivery])))
        held.attempts += 1
        wait = self.backoff.seconds(held.attempts)
        held.due = asyncio.get_running_loop().time() + wait
        self.counters.failed += 1
        log.warning(
            "message.failed",
            message_id=str(delivery.message.message_id),
            type=delivery.message.type,
            key=delivery.key,
            attempts=held.attempts,
            retry_in_s=round(wait, 3),
            error=f"{type(error).__name__}: {error}".splitlines()[0],
            # Where, without values: a traceback of structlog's default shows every local variable, payloads too.
            traceback="".join(format_tb(error.__traceback__)) if held.attempts == 1 else None,
        )

    async def _commit(self, batch: Sequence[Delivery]) -> None:
        """Apply in one transaction, then acknowledge; an outage of the database is waited for, unless we stop.

        Raises whatever a handler raised; then nothing of the batch is applied.
        """
        lost = 0
        while not self._stopping or not lost:
            if self.transactions.is_lost:
                try:
                    await self.transactions.open()
                except DatabaseUnavailableError as error:
                    lost += 1
                    await self._wait_for_database(lost, error)
                    continue
            try:
                applied = await self.transactions.apply(batch)
            except Exception as error:  # by a handler: anything
                if not self.transactions.is_lost:
                    raise
                lost += 1
                await self._wait_for_database(lost, error)
                continue
            duplicates = len(batch) - applied
            self.counters.applied += applied
            self.counters.duplicates += duplicates
            log.debug("batch.applied", messages=applied, duplicates=duplicates)
            self.settle(delivery.tag for delivery in batch)
            return

    async def _wait_for_database(self, attempts: int, error: Exception) -> None:
        wait = self.backoff.seconds(attempts)
        words = " ".join(str(error).split())
        log.warning("database.lost", attempts=attempts, retry_in_s=round(wait, 3), error=words)
        until = asyncio.get_running_loop().time() + wait
        while not self._stopping and (left := until - asyncio.get_running_loop().time()) > 0:
            await self._sleep(left)

    def _next_due(self) -> str | None:
        now = asyncio.get_running_loop().time()
        return next((key for key, held in self._held.items() if held.due <= now), None)

    def _until_next_due(self) -> float | None:
        if not self._held:
            return None
        return max(0.0, min(held.due for held in self._held.values()) - asyncio.get_running_loop().time())

    async def _sleep(self, seconds: float | None) -> None:
        """Sleep until a message comes, we are to stop, or the time is over."""
        self._wake.clear()
        await wait_for_event(self._wake, seconds)
