"""What can be asked of sent rows: the noun `replay`, whose jobs send them again."""

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import Field

from relay.errors import UsageError
from relay.jobs.job import Job
from relay.operate.asked import A_MOMENT, MOST, MaybeReasoned, MessageFilter, Moment, ShortString, Staged, check_choice
from relay.operate.messages.whereabouts import WhyMissing, find_rows
from relay.operate.operation import SCAN_TIMEOUT, Effect, Role, Servers, operation
from relay.operate.sent.moment import parse_interval
from relay.operate.sent.selection import Day, SentSelection, count_by_day, count_waiting, first_day, now
from relay.operate.sent.target import Target, Trace, check_target
from relay.operate.sent.work import order_replay
from relay.servers.postgres.tables import Tables


class ReplayFilter(MessageFilter):
    """What sent rows have in common."""

    since: Annotated[Moment, Field(description=f"Sent at or after {A_MOMENT}.")] = None
    until: Annotated[Moment, Field(description="Sent before; only the days between the two are read.")] = None


class SentRows(ReplayFilter):
    """Which sent rows."""

    message_ids: Annotated[tuple[UUID, ...], Field(max_length=MOST)] = ()

    @property
    def is_everything(self) -> bool:
        return all(getattr(self, name) in (None, ()) for name in SentRows.model_fields)

    def selection(self, moment: datetime) -> SentSelection:
        """Return the rows that it means by a clock that shows `moment`; UsageError when nothing can match."""
        since, until = parse_interval(self.since, self.until, moment)
        return SentSelection(
            message_ids=list(self.message_ids) or None,
            aggregate_type=self.aggregate_type,
            aggregate_id=self.aggregate_id,
            event_type=self.event_type,
            since=since,
            until=until,
        )


@dataclass(frozen=True, slots=True)
class ReplayPreview:
    """What a replay would send."""

    rows: int
    days: list[Day]
    left_out: list[str]  # which rows match and are not sent, in words


class OrderReplay(SentRows, MaybeReasoned, Staged):
    """Which sent rows go out again, where to, and how carefully."""

    all: Annotated[bool, Field(description="Every sent row; needed when there is no filter.")] = False
    to_exchange: Annotated[
        ShortString | None, Field(description='In place of where they went; "" addresses a queue.')
    ] = None
    routing_key: Annotated[ShortString | None, Field(description="In place of theirs; needs to_exchange.")] = None
    trace: Annotated[Trace, Field(description="keep `traceparent`, move it into `x-link-traceparent`, or drop it.")] = (
        Trace.LINK
    )


@operation("replay.preview", "GET /replay/preview", Role.VIEWER)
def preview(at: Servers, asked: SentRows) -> ReplayPreview:
    """Count exactly what a replay would send, by day."""
    with at.connect(SCAN_TIMEOUT) as tables:
        selection = asked.selection(now(tables.connection))
        days = count_by_day(tables, selection)
        lines = left_out(tables, selection)
    return ReplayPreview(sum(day.rows for day in days), days, lines)


@operation("replay.order", "POST /replay", Role.OPERATOR, Effect.ORDERED)
def order(at: Servers, asked: OrderReplay) -> Job:
    """Send rows again that were sent before now, in order per key; a console does it."""
    if asked.routing_key is not None and asked.to_exchange is None:
        raise UsageError("routing_key needs to_exchange: rows of one filter may go to several exchanges")
    caution = asked.caution()
    check_choice(is_filtered=not asked.is_everything, is_all=asked.all)
    asyncio.run(check_target(at.settings.broker, asked.to_exchange, asked.routing_key))
    with at.connect(SCAN_TIMEOUT) as tables:
        return order_replay(
            tables,
            asked.selection(now(tables.connection)),
            by=at.by,
            why=asked.reason,
            target=Target(asked.to_exchange, asked.routing_key, asked.trace),
            caution=caution,
            by_console=at.by_console,
        )


def left_out(tables: Tables, selection: SentSelection) -> list[str]:
    """Return a line for each kind of rows that match and are not replayed: no longer kept, or not sent yet."""
    lines = []
    first = first_day(tables)
    if first is not None and (selection.since is None or selection.since < first):
        lines.append(f"sent rows are kept from {first:%Y-%m-%d} (UTC) on; nothing older can be replayed")
    if selection.message_ids and selection.since is None and selection.until is None:
        found = find_rows(tables, selection.message_ids).items()
        return lines + [
            f"{message_id} is not replayed: {row.words}"
            for message_id, row in found
            if isinstance(row, WhyMissing) or row.state != "sent"
        ]
    if selection.until is not None:
        return lines
    waiting = count_waiting(tables, selection)
    if waiting.pending:
        lines.append(f"{waiting.pending} more rows match and are pending: they go out by themselves, not by a replay")
    if waiting.parked:
        lines.append(f"{waiting.parked} more rows match and are parked, never sent: `relay parked retry` sends them")
    return lines
