"""Sent rows written by SQL, and the copies that a replay left in a queue: neither knows how a replay works."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, LiteralString

import psycopg
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue

from tests.support.eventually import eventually

ENSURE_DAYS = "SELECT outbox.ensure_sent_days((now() AT TIME ZONE 'UTC')::date - %s::integer - 1, 2)"

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

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self.connection = connection

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
        return list(range(first, last + 1))

    async def value(self, query: LiteralString, *parameters: object) -> Any:
        """Give the one value of the one row."""
        row = await (await self.connection.execute(query, parameters)).fetchone()
        assert row is not None
        return row[0]


class Copies:
    """A queue that gets everything, read to its end."""

    def __init__(self, channel: AbstractChannel, queue: AbstractQueue) -> None:
        self.channel = channel
        self.queue = queue

    async def count(self) -> int:
        queue = await self.channel.declare_queue(self.queue.name, passive=True)
        return queue.declaration_result.message_count or 0

    async def read(self, at_least: int = 0) -> list[AbstractIncomingMessage]:
        """Take all messages, in the order in which the broker took them."""
        number = max(at_least, await self.count())
        messages: list[AbstractIncomingMessage] = []
        tag = await self.queue.consume(messages.append, no_ack=True)  # type: ignore[arg-type]
        await eventually(lambda: len(messages) >= number, f"{number} messages in the queue", 30)
        await self.queue.cancel(tag)
        return messages


def ids_of(messages: Sequence[AbstractIncomingMessage]) -> list[int]:
    return [int(str(message.headers["x-outbox-id"])) for message in messages]


def faults(wanted: Collection[int], messages: Sequence[AbstractIncomingMessage]) -> list[str]:
    """Tell what is wrong: a row that is missing, one that nobody wanted, a key whose first copies are not in order."""
    seen: set[int] = set()
    by_key: defaultdict[str, list[int]] = defaultdict(list)
    for message, id_ in zip(messages, ids_of(messages), strict=True):
        if id_ not in seen:
            seen.add(id_)
            by_key[str(message.headers["x-aggregate-id"])].append(id_)
    found = [f"row {id_} is missing" for id_ in sorted(set(wanted) - seen)]
    found += [f"row {id_} was not selected" for id_ in sorted(seen - set(wanted))]
    return found + [f"key {key} came as {ids}" for key, ids in by_key.items() if ids != sorted(ids)]


def repeats(messages: Sequence[AbstractIncomingMessage]) -> int:
    """Count the messages beyond the first of each row."""
    return len(messages) - len(set(ids_of(messages)))
