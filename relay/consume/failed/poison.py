"""Count the attempts at redelivered messages, to find the message that processes die of.

When a process dies, the broker redelivers all the messages that it had in flight. Neither the redelivered flag nor the
broker's count shows which message was the cause (docs/decisions/0013-count-begun-tries.md). So the consumer writes down
an attempt at such a message just before it begins, and forgets it when it has ended. What stays are attempts that did
not end.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from uuid import UUID

from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.policies import LEAST_POISON_LIMIT
from relay.errors import DatabaseUnavailableError
from relay.runtime.backoff import Stopping

# The first delivery of a redelivered message was not counted, and the process may have died of it.
UNCOUNTED_ATTEMPTS = 1
# From this many attempts that did not end, a message is a suspect. It is tried alone: then no other can be the cause.
SUSPECT_FROM = LEAST_POISON_LIMIT - 1

BEGUN = """
    SELECT message_id, begun FROM {schema}.begun_message
    WHERE consumer_name = %(consumer)s AND message_id = ANY(%(message_ids)s)
"""

# In the order of message_id: two consumers that got the same messages wait for each other, and cannot deadlock.
BEGIN = """
    INSERT INTO {schema}.begun_message AS row (consumer_name, message_id)
    SELECT %(consumer)s, message_id
    FROM unnest(%(message_ids)s::uuid[]) AS came (message_id)
    ORDER BY message_id
    ON CONFLICT (consumer_name, message_id) DO UPDATE SET begun = row.begun + 1, begun_at = now()
"""

END = """
    DELETE FROM {schema}.begun_message WHERE consumer_name = %(consumer)s AND message_id = ANY(%(message_ids)s)
"""


class BegunAttempts:
    """The begun attempts at one consumer's redelivered messages."""

    def __init__(self, inbox: Inbox, session: InboxSession) -> None:
        self._consumer = inbox.consumer_name
        self._session = session
        self._begun, self._begin, self._end = (inbox.statement(text) for text in (BEGUN, BEGIN, END))
        self._ours: dict[UUID, int] = {}  # begun by this process and not ended, with the unended attempts before

    async def unended(self, message_ids: Collection[UUID], stopping: asyncio.Event) -> dict[UUID, int]:
        """Return for each message how many attempts did not end. Raises Stopping."""
        new = [message_id for message_id in message_ids if message_id not in self._ours]
        rows = await self._session.insist(stopping, self._begun, self._parameters(new)) if new else []
        told = {**self._ours, **dict(rows)}
        return {message_id: told.get(message_id, UNCOUNTED_ATTEMPTS) for message_id in message_ids}

    async def begin(self, unended: dict[UUID, int], stopping: asyncio.Event) -> None:
        """Write down that attempts at these messages begin; the counts are those of `unended`. Raises Stopping."""
        # A message that this process has begun already came back after a lost connection, not after a death.
        new = {message_id: count for message_id, count in unended.items() if message_id not in self._ours}
        if new:
            await self._session.insist(stopping, self._begin, self._parameters(new))
        self._ours |= new

    async def end(self, message_ids: Collection[UUID]) -> None:
        """Forget attempts that have ended. Those that cannot be forgotten now are left to `end_all`."""
        if ended := [message_id for message_id in message_ids if message_id in self._ours]:
            with suppress(DatabaseUnavailableError):
                await self._session.run(self._end, self._parameters(ended))
                for message_id in ended:
                    self._ours.pop(message_id, None)

    async def end_all(self) -> None:
        """Forget all attempts of this process, after its work has ended."""
        await self.end(list(self._ours))

    async def forget(self, message_id: UUID, stopping: asyncio.Event) -> None:
        """Forget the attempts at a message that is a dead letter now, unless the consumer stops before."""
        with suppress(Stopping):
            await self._session.insist(stopping, self._end, self._parameters([message_id]))

    def _parameters(self, message_ids: Collection[UUID]) -> dict[str, object]:
        return {"consumer": self._consumer, "message_ids": list(message_ids)}
