"""Compare what an operator asks for: words to moments, both databases, one report."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from relay.config.settings import BrokerSettings, DatabaseSettings
from relay.consume.failed.queues import dead_queue_name
from relay.errors import OutboxError, UsageError
from relay.operate.letters.letter import Held, LetterSelection
from relay.operate.letters.read import read_letters
from relay.operate.messages.whereabouts import WhyMissing, find_rows
from relay.operate.reconcile.inbox import OWN, InboxReader
from relay.operate.reconcile.interval import Interval
from relay.operate.reconcile.report import ReconcileReport
from relay.operate.reconcile.run import Question, Show, reconcile
from relay.operate.sent.moment import parse_interval, parse_length
from relay.operate.sent.selection import SentSelection, now
from relay.operate.session import session
from relay.servers.postgres.tables import Tables

EVERY_LETTER = LetterSelection()
FIRST_MOMENT = datetime(1970, 1, 1, tzinfo=UTC)  # nothing was sent before
LONGEST_GRACE = timedelta(days=36_500)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileRequest:
    """What to compare, as an operator writes it: `since` and `until` are moments, or lengths of time ago."""

    since: str
    until: str | None = None
    message_ids: Sequence[UUID] = ()
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    event_type: str | None = None
    consumers: Sequence[str] = ()  # none: all that the inbox knows
    grace: str = "60s"  # what was sent within this need not have been applied yet
    with_repeated_keys: bool = False
    limit: int = 20  # of each kind, how many are named
    flags: tuple[str, ...] = field(default=())  # for the command that mends it


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The report, and in words where each named message is that was not compared."""

    report: ReconcileReport
    not_compared: list[str]


def ask(
    outbox: DatabaseSettings,
    inbox: DatabaseSettings,
    asked: ReconcileRequest,
    *,
    timeout: float,
    broker: BrokerSettings | None = None,
    inbox_url: str = OWN,
    show: Show = lambda *_: None,
) -> Reconciled:
    """Compare; nothing is changed. It runs event loops, so a coroutine calls it in a thread.

    Args:
        timeout: seconds for each statement.
        broker: where the dead letters of the consumers are; None: they count as missing.
        inbox_url: what the operator calls the URL of the inbox.
    Raises:
        UsageError: a moment or a length of time cannot be.
        NotFoundError: no consumer is named, and the inbox knows no consumer.
        OutboxError: as `session` and `InboxReader.open`.
    """
    with (
        session(outbox, timeout=timeout) as tables,
        InboxReader.open(inbox, timeout=timeout, url=inbox_url) as opened,
    ):
        moment = now(tables.connection)
        first, end = parse_interval(asked.since, asked.until, moment)
        assert first is not None, "since is required"  # noqa: S101
        grace = parse_length(asked.grace, "--grace")
        if grace > LONGEST_GRACE:
            raise UsageError(f"--grace {asked.grace} is longer than the {LONGEST_GRACE.days} days that it may be")
        first = max(first, FIRST_MOMENT)
        question = Question(
            interval=Interval(first, max(first, min(end or moment, moment)), moment, grace),
            selection=SentSelection(
                message_ids=list(asked.message_ids) or None,
                aggregate_type=asked.aggregate_type,
                aggregate_id=asked.aggregate_id,
                event_type=asked.event_type,
            ),
            consumers=sorted(set(asked.consumers)) or None,
            with_repeated_keys=asked.with_repeated_keys,
            limit=asked.limit,
            flags=asked.flags,
        )
        letters = _DeadLetters(broker)
        report = reconcile(tables, opened, question, look_up_dead=letters.message_ids, show=show)
        return Reconciled(report, [*_not_compared(tables, question), *letters.unread])


class _DeadLetters:
    """The message ids of dead letters, each queue read once and when it is needed."""

    def __init__(self, broker: BrokerSettings | None) -> None:
        self._broker = broker
        self._found: dict[str, set[str]] = {}
        self.unread: list[str] = []  # why

    def message_ids(self, queue: str) -> set[str]:
        """Return those of a consumed queue; none where its dead letters cannot be read."""
        if queue not in self._found:
            found = self._found[queue] = set()
            name = dead_queue_name(queue)
            try:
                if self._broker is not None:
                    asyncio.run(read_letters(self._broker, name, EVERY_LETTER, lambda held: _note(found, held)))
            except OutboxError as error:
                self.unread.append(f"dead letters of {queue} are counted as missing: {error}")
        return self._found[queue]


def _note(found: set[str], held: Held) -> None:
    if held.letter.message_id is not None:
        found.add(held.letter.message_id.lower())


def _not_compared(tables: Tables, question: Question) -> list[str]:
    since, until = question.interval.since, question.interval.until
    return [
        f"{message_id} is not compared: {row.words}"
        for message_id, row in find_rows(tables, question.selection.message_ids or []).items()
        if isinstance(row, WhyMissing) or row.sent_at is None or not since <= row.sent_at < until
    ]
