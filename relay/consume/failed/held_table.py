"""The held messages: those that failed and wait for their next try, and the later messages of their keys.

A row is committed before its message is acknowledged. The row is deleted in the transaction that applies the message,
or once the broker has the message as a dead letter. The first row of a key is its head; only heads are tried.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

from relay.consume.apply.fence import NO_PARTITION, Fence
from relay.consume.apply.inbox import Admission, Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.classify import Failure, FailureReason, History, first_line, name_of
from relay.consume.failed.envelope import history_of, pack, unpack
from relay.consume.message import Delivery, read_delivery
from relay.logger import get_logger
from relay.observe.printable import printable

NOTHING_YET = dict.fromkeys(("last_failed_at", "wait", "exception", "error", "reason"))  # for a message behind a head
# After this time another process may try a claimed message; while a handler works on it, its row is locked. So a key
# waits this long after each process that dies of its message.
CLAIM_FOR = timedelta(seconds=10)
PUT_OFF_FOR = timedelta(seconds=30)  # for a message that cannot be read

log = get_logger("relay.consume")

# An arriving message is admitted if its key is not held. With ORDER BY and LIMIT the server must use the index. With
# EXISTS it scans the whole table when its statistics say that the table is empty (tests/consume/test_plans.py).
NOT_HELD = Admission(
    where="""(
        SELECT held.position FROM {schema}.held_message AS held
        WHERE held.consumer_name = %(consumer)s AND held.key = arrived.key
        ORDER BY held.position LIMIT 1
    ) IS NULL"""
)

# A held message is deleted in the transaction that applies it. A row that another process has locked is skipped.
TAKEN = Admission(
    beginning="""
        chosen AS (
            SELECT position FROM {schema}.held_message
            WHERE consumer_name = %(consumer)s AND message_id = ANY(%(message_ids)s)
            FOR UPDATE SKIP LOCKED
        ),
        taken AS (
            DELETE FROM {schema}.held_message AS held USING chosen
            WHERE held.position = chosen.position
            RETURNING held.message_id
        ),
    """,
    where="message_id IN (SELECT taken.message_id FROM taken)",
)

# A message that is held already stays as it is, but its row gets a new version: see DELETE. A message that waits to
# become a dead letter may already be one that an operator has sent back: then it must be tried.
PUT = """
    INSERT INTO {schema}.held_message AS held (
        consumer_name, partition, key, message_id, event_type, exchange, routing_key, envelope, body,
        attempts, first_failed_at, last_failed_at, due_at, exception, error, reason
    )
    VALUES (
        %(consumer)s, %(partition)s, %(key)s, %(message_id)s, %(event_type)s, %(exchange)s, %(routing_key)s,
        %(envelope)s, %(body)s,
        %(attempts)s, %(first_failed_at)s, %(last_failed_at)s, coalesce(now() + %(wait)s::interval, 'infinity'),
        %(exception)s, %(error)s, %(reason)s
    )
    ON CONFLICT (consumer_name, message_id) DO UPDATE SET reason = excluded.reason
"""

CLAIM = """
    UPDATE {schema}.held_message AS held SET begun = begun + 1, due_at = now() + %(claim)s
    FROM (
        SELECT position FROM {schema}.held_message AS due
        WHERE consumer_name = %(consumer)s AND due_at <= now()
            AND partition = %(partition)s
            AND NOT EXISTS (
                SELECT FROM {schema}.held_message AS earlier
                WHERE earlier.consumer_name = %(consumer)s AND earlier.key = due.key AND earlier.position < due.position
            )
        ORDER BY due_at
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) AS head
    WHERE held.position = head.position
    RETURNING held.position, message_id, event_type, key, exchange, routing_key, envelope, body, held_at, attempts,
        first_failed_at, last_failed_at, exception, error, reason, begun, held.xmin::text
"""

# A role that may change `due_at` may have written -infinity, with which the server cannot subtract.
NEXT_DUE = """
    SELECT extract(epoch FROM greatest(due_at, now()) - now())::float8 FROM {schema}.held_message
    WHERE consumer_name = %(consumer)s AND due_at < 'infinity'
        AND partition = %(partition)s
    ORDER BY due_at LIMIT 1
"""

# A message behind a head waits until it is the first of its key and a process makes it due. Two processes do that, each
# after its commit: the one that deleted the message before it, and the one that put it there. At least one of them sees
# the other's commit.
PROMOTE = """
    UPDATE {schema}.held_message SET due_at = now()
    WHERE due_at = 'infinity' AND position IN (
        SELECT (SELECT min(position) FROM {schema}.held_message WHERE consumer_name = %(consumer)s AND key = of.key)
        FROM unnest(%(keys)s::text[]) AS of (key)
    )
"""

# The same for all keys, as a process may have died before it made a message due. It costs one step in the index for
# each key, however many messages the key has.
PROMOTE_ALL = """
    WITH RECURSIVE head (key, position, due_at) AS (
        (SELECT key, position, due_at FROM {schema}.held_message
         WHERE consumer_name = %(consumer)s ORDER BY key, position LIMIT 1)
        UNION ALL
        SELECT next.key, next.position, next.due_at
        FROM head CROSS JOIN LATERAL (
            SELECT key, position, due_at FROM {schema}.held_message
            WHERE consumer_name = %(consumer)s AND key > head.key ORDER BY key, position LIMIT 1
        ) AS next
    )
    UPDATE {schema}.held_message SET due_at = now()
    WHERE position = ANY(ARRAY(SELECT position FROM head WHERE due_at = 'infinity'))
"""

# Only the holder of a partition tries its messages. So a message that is still claimed when the holder looks was left
# behind by a former holder.
UNCLAIM = """
    UPDATE {schema}.held_message SET due_at = now()
    WHERE consumer_name = %(consumer)s AND partition = %(partition)s AND begun > 0
        AND due_at > now() AND due_at < 'infinity'
"""

COUNT = """
    SELECT count(*) FROM {schema}.held_message
    WHERE consumer_name = %(consumer)s AND partition = %(partition)s
"""

POSTPONE = """
    UPDATE {schema}.held_message
    SET begun = 0, attempts = %(attempts)s, first_failed_at = %(first_failed_at)s,
        last_failed_at = %(last_failed_at)s, due_at = now() + %(wait)s, exception = %(exception)s,
        error = %(error)s, reason = %(reason)s
    WHERE position = %(position)s
"""

RELEASE = """
    UPDATE {schema}.held_message SET begun = begun - 1, due_at = now() WHERE position = %(position)s
"""

PUT_OFF = """
    UPDATE {schema}.held_message
    SET begun = begun - 1, due_at = now() + %(wait)s, exception = %(exception)s, error = %(error)s
    WHERE position = %(position)s
"""

# The row stays if the message has come again since the claim: an operator may have sent the dead letter back at once.
# That copy was acknowledged because this row exists.
DELETE = """
    DELETE FROM {schema}.held_message WHERE position = %(position)s AND xmin = %(version)s::xid
    RETURNING position
"""


class _Row(NamedTuple):
    """The columns that `CLAIM` returns."""

    position: int
    message_id: UUID
    event_type: str
    key: str
    exchange: str
    routing_key: str
    envelope: bytes
    body: bytes
    held_at: datetime
    attempts: int
    first_failed_at: datetime | None
    last_failed_at: datetime | None
    exception: str | None
    error: str | None
    reason: str | None
    begun: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first held message of a key, claimed by this process."""

    position: int
    version: str  # of its row, at the claim
    delivery: Delivery
    unended: int  # attempts that did not end
    history: History
    dead: Failure | None  # set when it waits to become a dead letter


class NoHead(Enum):
    """Why a claim took no head."""

    NONE_DUE = auto()
    UNREADABLE = auto()  # the head was put off


class HeldTable:
    """The held messages of one consumer, or of the partition that it holds.

    When a method raises DatabaseUnavailableError, its statement may have been done.
    """

    def __init__(self, inbox: Inbox, session: InboxSession, fence: Fence | None = None) -> None:
        self._inbox = inbox
        self._session = session
        self._fence = fence

    async def put(self, delivery: Delivery, failure: Failure, stopping: asyncio.Event) -> None:
        """Hold a message that failed. Raises Stopping: it may not be held."""
        row = {**self._row(delivery), **_columns_of(failure), "wait": timedelta(seconds=failure.wait)}
        await self._session.insist(stopping, self._inbox.statement(PUT), row)

    async def put_behind(self, deliveries: Sequence[Delivery], stopping: asyncio.Event) -> None:
        """Hold messages behind the held ones of their keys, in this order. Raises Stopping: they may not be held."""
        rows = [{**self._row(delivery), **NOTHING_YET} for delivery in deliveries]
        keys = sorted({delivery.key for delivery in deliveries})
        await self._session.insist(stopping, self._inbox.statement(PUT), *rows)
        await self._session.insist(stopping, self._inbox.statement(PROMOTE), self._of(keys=keys))

    async def claim(self) -> Head | NoHead:
        """Claim a head that is due, and write down that an attempt begins."""
        rows = await self._run(CLAIM, claim=CLAIM_FOR)
        if not rows:
            return NoHead.NONE_DUE
        row = _Row(*rows[0])
        try:
            return self._head(row)
        except Exception as error:  # any: the row is kept, perhaps for a later release, and other keys go on
            await self._put_off(row, name_of(error), f"it cannot be read: {first_line(error)}")
            return NoHead.UNREADABLE

    async def next_due(self) -> float | None:
        """Return the seconds until the next head is due; None: no head waits for its time."""
        rows = await self._run(NEXT_DUE)
        return float(rows[0][0]) if rows else None

    async def look_around(self) -> int:
        """Make due the messages that other processes have left behind, and return how many messages are held."""
        await self._run(PROMOTE_ALL)
        if self._fence is not None:
            await self._run(UNCLAIM)
        ((count,),) = await self._run(COUNT)
        return int(count)

    async def postpone(self, head: Head, failure: Failure, wait: float) -> None:
        """Write down that an attempt has failed; the next one is in `wait` seconds."""
        await self._run(POSTPONE, position=head.position, wait=timedelta(seconds=wait), **_columns_of(failure))

    async def release(self, head: Head) -> None:
        """Give up the claim: the attempt has not taken place."""
        await self._run(RELEASE, position=head.position)

    async def delete_unchanged(self, head: Head) -> bool:
        """Delete a message that is safe elsewhere. Return False if it has come again since the claim, and so stays."""
        return bool(await self._run(DELETE, position=head.position, version=head.version))

    async def promote(self, head: Head) -> None:
        """Make the next message of a key due, after its head is gone."""
        await self._run(PROMOTE, keys=[head.delivery.key])

    async def _run(self, statement: LiteralString, **parameters: Any) -> list[tuple[Any, ...]]:
        return await self._session.run(self._inbox.statement(statement), self._of(**parameters))

    def _of(self, **parameters: Any) -> dict[str, Any]:
        partition = NO_PARTITION if self._fence is None else self._fence.partition
        return {"consumer": self._inbox.consumer_name, "partition": partition, **parameters}

    def _row(self, delivery: Delivery) -> dict[str, Any]:
        history = history_of(delivery.delivered)
        return self._of(
            key=delivery.key,
            message_id=delivery.message.identity,
            event_type=delivery.message.type,
            exchange=delivery.delivered.exchange or "",
            routing_key=delivery.message.routing_key,
            envelope=pack(delivery.delivered),
            body=delivery.delivered.body,
            attempts=history.attempts,
            first_failed_at=history.first_failed_at,
        )

    async def _put_off(self, row: _Row, exception: str, words: str) -> None:
        await self._run(PUT_OFF, position=row.position, wait=PUT_OFF_FOR, exception=exception, error=words)
        log.warning(
            "message.failed",
            message_id=str(row.message_id),
            type=row.event_type,
            key=row.key,
            attempts=row.attempts,
            retry_in_s=PUT_OFF_FOR.total_seconds(),
            error=f"{exception}: {words}",
            summary=printable(
                f"{row.event_type} {row.key}: {exception}: {words} (again in {PUT_OFF_FOR.total_seconds():g} s)"
            ),
        )

    def _head(self, row: _Row) -> Head:
        delivered = unpack(row.envelope, row.body, exchange=row.exchange, routing_key=row.routing_key)
        if self._fence is not None:
            self._fence.stamp(delivered)
        read = read_delivery(delivered, self._inbox.consumer_name)
        assert isinstance(read, Delivery), "only what could be read is held"  # noqa: S101
        # With the key and id under which it was held: the inbox may have had another scope then.
        delivery = replace(read, key=row.key, message=replace(read.message, inbox_id=row.message_id))
        history = History(row.attempts, row.first_failed_at)
        dead = None
        if row.reason is not None:
            first, last = row.first_failed_at or row.held_at, row.last_failed_at or row.held_at
            dead = Failure(
                attempts=row.attempts,
                first_failed_at=first,
                failed_at=last,
                exception=row.exception or "",
                words=row.error or "",
                reason=FailureReason(row.reason),
            )
        return Head(
            position=row.position,
            version=row.version,
            delivery=delivery,
            unended=row.begun - 1,
            history=history,
            dead=dead,
        )


def _columns_of(failure: Failure) -> dict[str, Any]:
    return {
        "attempts": failure.attempts,
        "first_failed_at": failure.first_failed_at,
        "last_failed_at": failure.failed_at,
        "exception": failure.exception,
        "error": failure.words,
        "reason": failure.reason and failure.reason.value,
    }
