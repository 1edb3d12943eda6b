"""Sent rows and the inbox of their consumers, in two databases, written by SQL."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

from relay.config.settings import DatabaseSettings
from relay.operate.reconcile.inbox import FLAG, InboxReader
from relay.operate.reconcile.interval import Interval
from relay.operate.reconcile.report import ReconcileReport
from relay.operate.reconcile.run import Question, Show, reconcile
from relay.operate.sent.selection import SentSelection, now
from relay.operate.session import session
from tests.operate.rows import Rows
from tests.support.days import make_days

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)

SEND = """
    INSERT INTO outbox.message
        (message_id, aggregate_type, aggregate_id, event_type, payload, state, sent_at, written_as)
    SELECT message_id, 'invoice', '7', %(event_type)s, '1', 'sent', now() - %(ago)s, %(writer)s
    FROM unnest(%(message_ids)s::uuid[]) AS given (message_id)
"""
APPLY = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day, processed_at, business_key)
    SELECT %(consumer)s, message_id, ((now() - %(ago)s) AT TIME ZONE 'UTC')::date, now() - %(ago)s, %(business_key)s
    FROM unnest(%(message_ids)s::uuid[]) AS given (message_id)
"""


class Ends:
    """Both ends: what was sent, and what was applied. `ago` is how long before now."""

    def __init__(self, outbox: DatabaseSettings, inbox: DatabaseSettings) -> None:
        self._databases = outbox, inbox
        self.rows = Rows(outbox.url.get_secret_value())
        self.inbox = psycopg.connect(inbox.url.get_secret_value(), autocommit=True)
        # So that what was applied an hour ago, just after midnight, is not of the first hours that are kept.
        self.rows.connection.execute("SELECT outbox.ensure_sent_days((now() AT TIME ZONE 'UTC')::date - 1, 1)")

    def send(
        self,
        number: int = 1,
        *,
        ago: timedelta = HOUR,
        event_type: str = "InvoiceIssued",
        ids: Iterable[UUID] = (),
        writer: str = "app",
    ) -> list[UUID]:
        """Write sent rows and give their message ids; `ids`: these, in place of new ones."""
        message_ids = list(ids) or [uuid4() for _ in range(number)]
        connection = self.rows.connection
        connection.execute(make_days("(now() - %s) AT TIME ZONE 'UTC'"), [ago])
        values = {"message_ids": message_ids, "ago": ago, "event_type": event_type, "writer": writer}
        connection.execute(SEND, values)
        return message_ids

    def apply(
        self,
        message_ids: Iterable[UUID],
        consumer: str = "billing",
        *,
        ago: timedelta = HOUR,
        business_key: str | None = None,
    ) -> None:
        values = {"consumer": consumer, "message_ids": list(message_ids), "ago": ago, "business_key": business_key}
        self.inbox.execute("SELECT outbox.ensure_inbox_days(((now() - %s) AT TIME ZONE 'UTC')::date, 1)", [ago])
        self.inbox.execute(APPLY, values)

    def reconcile(
        self,
        *,
        since: timedelta = 3 * HOUR,
        until: timedelta = timedelta(0),
        grace: timedelta = MINUTE,
        selection: SentSelection | None = None,
        show: Show = lambda *_: None,
        **more: Any,
    ) -> ReconcileReport:
        """Compare what was sent between two moments before now."""
        outbox, inbox = self._databases
        with (
            session(outbox) as tables,
            InboxReader.open(inbox, timeout=60, url=FLAG) as opened,
        ):
            moment: datetime = now(tables.connection)
            interval = Interval(moment - since, moment - until, moment, grace)
            question = Question(interval=interval, selection=selection or SentSelection(), **more)
            return reconcile(tables, opened, question, show=show)

    def close(self) -> None:
        self.rows.connection.close()
        self.inbox.close()


def figures(report: ReconcileReport) -> dict[str, tuple[int, int, int, int]]:
    """Return expected, applied, missing and lost of each consumer."""
    return {each.consumer: (each.expected, each.applied, each.missing, each.lost) for each in report.consumers}
