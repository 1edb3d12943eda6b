"""Count the tries of messages that come again, to find the one that processes die of.

A process that dies takes everything along that it had in hand, and all of it comes again as redelivered. Neither that
mark nor the broker's count says which message it was (docs/decisions/0013-count-begun-tries.md). So an attempt at such
a message is written down just before it begins, and forgotten when it has ended. What stays are attempts that did not
end.
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

# The first delivery of what comes again: nobody counted it, and it may be what the process died of.
UNCOUNTED_ATTEMPTS = 1
# Attempts that did not end. A suspect is tried alone, so that no other message is to blame.
SUSPECT_FROM = LEAST_POISON_LIMIT - 1

BEGUN = """
    SELECT message_id, begun FROM {schema}.begun_message
    WHERE consumer_name = %(consumer)s AND message_id = ANY(%(message_ids)s)
"""

# In the order of message_id: two consumers that got the same messages wait for each other, never in a circle.
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
    """The begun tries of one consumer's messages that came again."""

    def __init__(self, inbox: Inbox, session: InboxSession) -> None:
        self._consumer = inbox.consumer_name
        self._session = session
        self._begun, self._begin, self._end = (inbox.statement(text) for text in (BEGUN, BEGIN, END))
        self._ours: dict[UUID, int] = {}  # begun by this process and not ended: how many others had not, before

    async def unended(self, message_ids: Collection[UUID], stopping: asyncio.Event) -> dict[UUID, int]:
        """Return for each how many attempts did not end. Raises Stopping."""
        new = [message_id for message_id in message_ids if message_id not in self._ours]
        rows = await self._session.insist(stopping, self._begun, self._parameters(new)) if new else []
        counted = {**self._ours, **dict(rows)}
        return {message_id: counted.get(message_id, UNCOUNTED_ATTEMPTS) for message_id in message_ids}

    async def begin(self, unended: dict[UUID, int], stopping: asyncio.Event) -> None:
        """Write down that these are tried now, with what `unended` returned for them. Raises Stopping."""
        # What we have begun already was brought back by a lost connection, not by a death.
        new = {message_id: count for message_id, count in unended.items() if message_id not in self._ours}
        if new:
            await self._session.insist(stopping, self._begin, self._parameters(new))
        self._ours |= new

    async def end(self, message_ids: Collection[UUID]) -> None:
        """Forget tries that have ended; what cannot be forgotten now is with `end_all`."""
        if ended := [message_id for message_id in message_ids if message_id in self._ours]:
            with suppress(DatabaseUnavailableError):
                await self._session.run(self._end, self._parameters(ended))
                for message_id in ended:
                    self._ours.pop(message_id, None)

    async def end_all(self) -> None:
        """Forget all: nothing is under way any more."""
        await self.end(list(self._ours))

    async def forget(self, message_id: UUID, stopping: asyncio.Event) -> None:
        """Forget the attempts at a message that is given up and safe elsewhere, unless the consumer stops before."""
        with suppress(Stopping):
            await self._session.insist(stopping, self._end, self._parameters([message_id]))

    def _parameters(self, message_ids: Collection[UUID]) -> dict[str, object]:
        return {"consumer": self._consumer, "message_ids": list(message_ids)}
