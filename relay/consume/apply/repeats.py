"""Acknowledge many repeats at once: a replay sends thousands in a row, and a transaction for each would be for nothing.

What the inbox knows has no effect, so it may be acknowledged in any order. Only what is new keeps its place in its key.
"""

import asyncio
from collections.abc import Sequence
from uuid import UUID

from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_session import InboxSession
from relay.consume.message import Delivery

LOOKED_UP_AT_ONCE = 500  # deliveries

# A subquery, as a join may read all that is remembered (tests/consume/test_plans.py).
KNOWN = """
    SELECT message_id
    FROM unnest(%(message_ids)s::uuid[], %(days)s::date[]) AS came (message_id, message_day)
    WHERE (
        SELECT true FROM {schema}.processed_message AS known
        WHERE known.consumer_name = %(consumer)s AND known.message_id = came.message_id
            AND known.message_day = came.message_day
        LIMIT 1
    )
"""


class Repeats:
    """Which deliveries of one channel are repeats.

    Attributes:
        expected: what was worked on last was known: it may be a replay.
        turn: who looks up has it, so that what arrives meanwhile is looked up together.
    """

    def __init__(self, inbox: Inbox, session: InboxSession) -> None:
        self.expected = False
        self.turn = asyncio.Lock()
        self._consumer = inbox.consumer_name
        self._session = session
        self._known = inbox.statement(KNOWN)

    async def known(self, deliveries: Sequence[Delivery], stopping: asyncio.Event) -> set[UUID]:
        """Return the ids of those that were applied and committed. Raises Stopping."""
        parameters = {
            "consumer": self._consumer,
            "message_ids": [delivery.message.message_id for delivery in deliveries],
            "days": [delivery.message.day for delivery in deliveries],
        }
        rows = await self._session.insist(stopping, self._known, parameters)
        return {message_id for (message_id,) in rows}
