"""`relay reconcile`."""

import asyncio
from typing import Annotated

import psycopg
from cyclopts import Parameter, validators

from relay.cli.options import (
    DatabaseOptions,
    InboxSchema,
    InboxUrl,
    Length,
    MessageFilters,
    MessageIds,
    Output,
    inbox_settings,
)
from relay.cli.printing import aside, complain, print_json
from relay.cli.reconcile_drawing import print_report, shown_progress
from relay.database import refuse_pooler
from relay.operate.reconcile.inbox import Inbox
from relay.operate.reconcile.interval import Interval
from relay.operate.reconcile.run import Question
from relay.operate.reconcile.run import reconcile as compare
from relay.operate.session import session
from relay.operate.whereabouts import find_rows
from relay.replay.moment import parse_interval, parse_length
from relay.replay.selection import Selection, now
from relay.scrub import redacted

SCAN_TIMEOUT = 3600.0  # seconds for a statement: days of sent rows are read from end to end


def reconcile(
    *message_ids: MessageIds,
    since: Annotated[str, Parameter(help="Sent at or after 2026-11-21T08:00:00Z, or 2h ago: `2h`.")],
    until: Annotated[str | None, Parameter(help="Sent before; else until now.")] = None,
    inbox: InboxUrl = None,
    inbox_schema: InboxSchema = None,
    consumer: Annotated[
        list[str] | None, Parameter(help="Name of a consumer; may be repeated. Else all that the inbox knows.")
    ] = None,
    grace: Annotated[Length, Parameter(help="What was sent within this need not have been applied yet.")] = "60s",
    filters: MessageFilters | None = None,
    unique_business_key: Annotated[
        bool, Parameter(help="A business key that a consumer has applied twice is a difference, too.")
    ] = False,
    limit: Annotated[
        int, Parameter(help="Of each kind, name at most so many.", validator=validators.Number(gte=1))
    ] = 20,
    options: DatabaseOptions | None = None,
    output: Output = "text",
) -> int:
    """Compare what was sent with what consumers have applied; exit with 1 on a difference, and tell what mends it."""
    options, filters = options or DatabaseOptions(), filters or MessageFilters()
    database = options.load().settings.database
    asyncio.run(refuse_pooler(database))
    of_inbox = inbox_settings(database, inbox, inbox_schema)
    with (
        session(database, timeout=SCAN_TIMEOUT) as outbox,
        Inbox.open(of_inbox, timeout=SCAN_TIMEOUT, is_apart=inbox is not None) as opened,
    ):
        moment = now(outbox)
        first, end = parse_interval(since, until, moment)
        assert first is not None, "--since is required"  # noqa: S101
        question = Question(
            interval=Interval(first, min(end or moment, moment), moment, parse_length(grace, "--grace")),
            selection=Selection(
                message_ids=list(message_ids) or None,
                aggregate_type=filters.aggregate_type,
                aggregate_id=filters.aggregate_id,
                event_type=filters.event_type,
            ),
            consumers=sorted(set(consumer)) if consumer else None,
            with_repeated_keys=unique_business_key,
            limit=limit,
            flags=_flags(options),
        )
        with shown_progress() as show:
            report = compare(outbox, database.schema_name, opened, question, show)
        _tell_what_is_not_compared(outbox, database.schema_name, question)
    if report.kept_from is not None and first < report.kept_from:
        aside(f"sent rows are kept from {report.kept_from:%Y-%m-%d} (UTC) on; nothing older can be compared")
    if output == "json":
        print_json(report)
    else:
        print_report(report)
    for difference in report.differences:
        complain(difference)
    return 1 if report.differences else 0


def _tell_what_is_not_compared(outbox: psycopg.Connection, schema: str, question: Question) -> None:
    """Say on stderr where each named message is whose row is not among those that were compared."""
    since, until = question.interval.since, question.interval.until
    for message_id, row in find_rows(outbox, schema, question.selection.message_ids or []).items():
        if isinstance(row, str):
            aside(f"{message_id} is not compared: {row}")
        elif row.sent_at is None or not since <= row.sent_at < until:
            aside(f"{message_id} is not compared: {row.words}")


def _flags(options: DatabaseOptions) -> tuple[str, ...]:
    """Give the flags that a command needs to find the same settings, without a password."""
    given = (
        ("--config", options.config and str(options.config)),
        ("--database-url", options.database_url and redacted(options.database_url)),
    )
    return tuple(word for name, value in given if value for word in (name, value))
