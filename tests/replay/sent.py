"""Sent rows written by SQL, and the copies that a replay left in a queue: neither knows how a replay works."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, LiteralString

import aio_pika
import psycopg
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue

from tests.support.days import make_days
from tests.support.eventually import eventually
from tests.support.log import MOVE

END = "end"  # behind everything that was confirmed before

ENSURE_DAYS = make_days("(now() AT TIME ZONE 'UTC')::date - %s::integer - 1", "2")

# Shuffled: where a row lies tells nothing of its place in the order. All are sent at one moment, as by one mark.
INSERT = """
    INSERT INTO outbox.message (id, aggregate_type, aggregate_id, event_type, payload, state, sent_at)
    SELECT n, 'customer', (n %% %(keys)s)::text, %(event_type)s, json_build_object('n', n, 'pad', repeat('x', %(pad)s)),
        'sent', now() - interval '1 minute' - %(days_ago)s * interval '1 day'
    FROM generate_series(%(first)s::bigint, %(last)s) AS n
    ORDER BY random()
"""


class SentRows:
    """The days of sent rows as a relay left them."""

    def __init__(self, connection: psycopg.AsyncConnection, *, is_logged: bool = False) -> None:
        self.connection = connection
        self._is_logged = is_logged

    async def add(
        self, number: int, *, keys: int = 50, days_ago: int = 0, event_type: str = "InvoiceIssued", pad: int = 10
    ) -> list[int]:
        """Write rows with ids above all others, and give the ids."""
        last = int(await self.value("SELECT nextval('outbox.message_id_seq') + %s", number))
        first = last - number + 1
        await self.connection.execute("SELECT setval('outbox.message_id_seq', %s)", [last])
        await self.connection.execute(ENSURE_DAYS, [days_ago])
        values = {"keys": keys, "days_ago": days_ago, "event_type": event_type, "pad": pad, "first": first}
        await self.connection.execute(INSERT, {**values, "last": last})
        if self._is_logged:
            await self.connection.execute(MOVE)
        return list(range(first, last + 1))

    async def value(self, query: LiteralString, *parameters: object) -> Any:
        """Return the one value of the one row."""
        row = await (await self.connection.execute(query, parameters)).fetchone()
        assert row is not None
        return row[0]


class Copies:
    """A queue that gets everything, and all that has come out of it, in order.

    One consumer from begin to end: cancelled in between, it would give messages back, and they would come out of order.
    """

    def __init__(self, channel: AbstractChannel, queue: AbstractQueue) -> None:
        self.channel = channel
        self.queue = queue
        self.messages: list[AbstractIncomingMessage] = []
        self._ends = 0

    @property
    def number(self) -> int:
        return len(self.messages)

    async def start(self) -> None:
        await self.queue.consume(self._take, no_ack=True)

    async def has(self, number: int) -> None:
        """Wait until so many have come."""
        await eventually(lambda: self.number >= number, f"{number} messages", 60)

    async def read(self) -> list[AbstractIncomingMessage]:
        """Return all that the broker has confirmed until now and that was not given before."""
        ends = self._ends + 1
        await self.channel.default_exchange.publish(aio_pika.Message(b"", type=END), self.queue.name)
        await eventually(lambda: self._ends == ends, "the end of the queue", 60)
        given, self.messages = self.messages, []
        return given

    async def _take(self, message: AbstractIncomingMessage) -> None:
        if message.type == END:
            self._ends += 1
        else:
            self.messages.append(message)


def ids_of(messages: Sequence[AbstractIncomingMessage]) -> list[int]:
    return [int(str(message.headers["x-outbox-id"])) for message in messages]


def faults(wanted: Collection[int], messages: Sequence[AbstractIncomingMessage]) -> list[str]:
    """Return what is wrong: a missing row, one that nobody wanted, a key whose first copies are not in order."""
    seen: set[int] = set()
    by_key: defaultdict[str, list[int]] = defaultdict(list)
    for message, id_ in zip(messages, ids_of(messages), strict=True):
        if id_ not in seen:
            seen.add(id_)
            by_key[str(message.headers["x-aggregate-id"])].append(id_)
    found = [f"row {id_} is missing" for id_ in sorted(set(wanted) - seen)]
    found += [f"row {id_} was not selected" for id_ in sorted(seen - set(wanted))]
    return found + [
        f"key {key}: {after} after {before}"
        for key, ids in by_key.items()
        for before, after in pairwise(ids)
        if after < before
    ]


def repeats(messages: Sequence[AbstractIncomingMessage]) -> int:
    """Count the messages beyond the first of each row."""
    return len(messages) - len(set(ids_of(messages)))
