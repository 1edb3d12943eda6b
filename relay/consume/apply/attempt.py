"""Try to apply messages; an outage of the database is waited for and is nobody's failure."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic, time

from psycopg.transaction import OutOfOrderTransactionNesting

from relay.consume.apply.inbox import Applied
from relay.consume.apply.partition_state import PartitionState
from relay.consume.apply.transactions import Transactions
from relay.consume.classify import Judge, first_line, is_outage, name_of, took_too_long
from relay.consume.counters import Counters
from relay.consume.hindrances import Entry, Outages, Overloaded, Stopping
from relay.consume.message import Delivery
from relay.consume.policies import Fault
from relay.errors import DatabaseUnavailableError, HandlerError, PartitionLostError
from relay.logger import get_logger

# It did what none may, or left a transaction() block of its own open.
BY_HANDLER = (HandlerError, OutOfOrderTransactionNesting)

log = get_logger("relay.consume")


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Tries on one database connection."""

    transactions: Transactions
    judge: Judge
    counters: Counters
    outages: Outages
    stopping: asyncio.Event
    state: PartitionState | None = None

    async def apply(self, batch: Sequence[Delivery], entry: Entry) -> Applied | Overloaded:
        """Apply in one transaction.

        Raises:
            Stopping: the consumer stops, before the database is there again or because another member has the
                partition. Nothing was applied, unless the answer to a commit was lost; no attempt counts.
            Exception: what a handler raised; nothing was applied.
        """
        with self.outages.begin() as outage:
            while not (outage.failures and self.stopping.is_set()):
                begun_at = monotonic()
                try:
                    applied = await self._apply(batch)
                except PartitionLostError:
                    await self.stopping.wait()  # the next check-in learns it, too, and stops us
                    raise Stopping from None
                except Exception as error:  # by a handler: anything
                    is_outage = self._is_outage(error)
                    if is_outage or isinstance(error, BY_HANDLER):
                        await self.transactions.close()  # with what a handler has set in its session, or still does
                    if is_outage:
                        await outage.wait(error, self.stopping)
                        continue
                    if self.judge.fault_of(error) is not Fault.OVERLOAD:
                        raise
                    self.counters.overloads += 1
                    entry.overloaded(f"{name_of(error)}: {first_line(error)}")
                    return Overloaded()
                outage.end()
                self.counters.times.observe(monotonic() - begun_at)
                self._count(batch, applied)
                if applied.count:
                    entry.succeeded()
                return applied
        raise Stopping

    async def connect(self) -> None:
        """Connect unless it is connected; raises DatabaseUnavailableError."""
        if not self.transactions.is_free:
            await self.transactions.open()

    async def close(self) -> None:
        await self.transactions.close()

    async def _apply(self, batch: Sequence[Delivery]) -> Applied:
        await self.connect()
        async with self.state.used() if self.state else nullcontext():
            self.counters.in_flight += 1
            try:
                return await self.transactions.apply(batch)
            finally:
                self.counters.in_flight -= 1

    def _is_outage(self, error: Exception) -> bool:
        if took_too_long(error) or isinstance(error, BY_HANDLER):
            return False  # the session is lost, too, by what the handler did
        return isinstance(error, DatabaseUnavailableError) or self.transactions.is_lost or is_outage(error)

    def _count(self, batch: Sequence[Delivery], applied: Applied) -> None:
        left = sum(delivery.message.message_id in applied.left for delivery in batch) if applied.left else 0
        duplicates = len(batch) - left - applied.count
        self.counters.applied += applied.count
        self.counters.duplicates += duplicates
        if applied.count and (written_at := batch[-1].message.timestamp) is not None:
            self.counters.last_age = max(0.0, time() - written_at.timestamp())
        log.debug("batch.applied", messages=applied.count, duplicates=duplicates)
