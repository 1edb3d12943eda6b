"""What may keep a message from its effect, a line each: for a wait of a `Scenario` that takes too long."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from uuid import UUID

from psycopg.sql import SQL

from relay.config.settings import BrokerSettings
from relay.consume import Consumer
from relay.consume.classify import Failure, History, Judge
from relay.consume.failed.queues import retry_queue_name
from relay.consume.queue_depth import ready_count
from relay.operate.cause import cause_of
from relay.operate.failures import Group, by_weight, group_letters, list_groups, list_held_groups
from relay.operate.letters.letter import Letter, LetterSelection
from relay.operate.letters.read import list_letters
from relay.operate.letters.work import queues_of
from relay.operate.routes.quarantine import failing_routes
from relay.servers.postgres.tables import Tables
from relay.servers.rabbitmq.connection import connect

MOST_SHOWN = 5  # errors of a consumer

UNSENT = SQL("""
    SELECT event_type, aggregate_type, aggregate_id, state FROM {schema}.message_state
    WHERE state <> 'sent' ORDER BY id LIMIT 5
""")
STATE = SQL("SELECT state FROM {schema}.message_state WHERE message_id = %(message_id)s")
NOTED = SQL("SELECT DISTINCT consumer_name FROM {schema}.consumer_queue ORDER BY consumer_name")
OWN_WORDS = SQL("""
    SELECT last_error FROM {schema}.message_state WHERE state = 'parked' AND last_error IS NOT NULL
    UNION ALL
    SELECT concat_ws(': ', exception, error) FROM {schema}.held_message WHERE attempts > 0
    LIMIT 1000
""")


class ToldJudge(Judge):
    """A judge that remembers what it said."""

    def __init__(self, consumer: Consumer) -> None:
        super().__init__(consumer.setup.failures)
        self._tries: Counter[str] = Counter()
        self._last: dict[str, Failure] = {}

    def failure(self, error: BaseException, history: History) -> Failure:
        failure = super().failure(error, history)
        self._tries[failure.error] += 1
        self._last[failure.error] = failure
        return failure

    def lines(self) -> list[str]:
        """Return what handlers raised, with its count and what followed from the last one."""
        return [
            f"tries that failed: {count}, by {words} ({self._last[words].outlook})"
            for words, count in self._tries.most_common(MOST_SHOWN)
        ]


def of_consumer(consumer: Consumer, judge: ToldJudge) -> list[str]:
    """Return what hinders a consumer, what it has in hand, and what its handlers raised."""
    hindrances, counters = consumer.hindrances(), consumer.counters
    lines = [f"{part}: {reason}" for part, reason in hindrances.items()]
    if (in_hand := max(counters.unacknowledged, counters.in_flight)) and "delivery" not in hindrances:
        lines.append(f"messages in hand: {in_hand}, of which handlers work on {counters.in_flight}")
    return [f"consumer of {consumer.queue}: {line}" for line in [*lines, *judge.lines()]]


def of_message(tables: Tables, message_id: UUID | None, consumer_name: str, consumers: Iterable[Consumer]) -> list[str]:
    """Return what is wrong with a wait for this message and this consumer; without an id it has no row yet."""
    noted = [name for (name,) in tables.execute(NOTED).fetchall()]
    names = sorted({*noted, *(consumer.setup.inbox.consumer_name for consumer in consumers)})
    lines = []
    if consumer_name not in names:
        lines.append(f"no consumer is named {consumer_name}; there is {', '.join(names) or 'none'}")
    if message_id is None:
        return [*lines, "no committed row of this type and key since the scenario began"]
    states = [state for (state,) in tables.execute(STATE, {"message_id": message_id}).fetchall()]
    return [*lines, f"its row is {states[0]}" if states else "no committed row has this message_id"]


def of_tables(tables: Tables, broker: BrokerSettings, queues: Sequence[str]) -> list[str]:
    """Return which rows wait, and what has failed; of several failures of one cause the words of one."""
    lines = [f"{state}: {type_} of {kind} {key}" for type_, kind, key, state in tables.execute(UNSENT).fetchall()]
    groups = [*list_groups(tables), *list_held_groups(tables)]
    words = [route.reason for route in failing_routes(tables)]
    words += [each for (each,) in tables.execute(OWN_WORDS).fetchall()]
    for queue in queues:
        letters, dead = _letters(broker, queue)
        groups += group_letters(letters, dead)
        words += [each for letter in letters if (each := letter.exception or letter.reason)]
    own = {cause_of(each): each for each in reversed(words)}
    return lines + [_line(group, own.get(group.cause, group.cause)) for group in by_weight(groups)]


def of_retries(broker: BrokerSettings, consumers: Sequence[Consumer]) -> list[str]:
    """Return how many messages wait in which retry queues."""
    with_queues = [each for each in consumers if not each.setup.failures.holds_keys]
    names = [retry_queue_name(each.queue, step) for each in with_queues for step in each.snapshot().steps]
    counts = asyncio.run(_counts(broker, names)) if names else []
    return [f"retry queue {name}: {count} waiting" for name, count in zip(names, counts, strict=True) if count]


async def _counts(broker: BrokerSettings, queues: Sequence[str]) -> list[int | None]:
    connection = await connect(broker, "outbox-scenario retry queues")
    try:
        return [await ready_count(connection, queue, broker.connect_timeout) for queue in queues]
    finally:
        await connection.hang_up()


def _letters(broker: BrokerSettings, queue: str) -> tuple[list[Letter], str]:
    _, dead = queues_of(queue)
    letters, _ = asyncio.run(list_letters(broker, dead, LetterSelection()))
    return letters, dead


def _line(group: Group, words: str) -> str:
    return f"{group.source}: {group.count} of {group.event_type or 'any type'} at {group.place}: {words}"
