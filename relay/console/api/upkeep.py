"""`/retention`, `/topology`, `/reconcile`: what is done now and then."""

from datetime import date
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from relay.config.topology import TopologySettings
from relay.console.api.once import Once
from relay.console.given import Alone, Configured, Owner, Viewer, compare_with_inbox
from relay.errors import UsageError
from relay.operate.asked import MOST, Closed, Limit, MessageFilter, Reasoned, Text
from relay.operate.definitions import definitions
from relay.operate.reconcile.ask import ReconcileRequest
from relay.operate.reconcile.report import ReconcileReport
from relay.operate.retention import drop_old_days, keeps_of, look_at_old_days
from relay.retention.day import Fate, OldDay

router = APIRouter()
Keep = Annotated[Text | None, Field(description='"30 days"; else as the settings say.')]


class Keeps(Closed):
    """How long rows are kept."""

    keep: Keep = None
    keep_inbox: Keep = None


class RetentionDrop(Keeps, Reasoned):
    """What to drop, and why."""


class RetentionDay(Closed):
    """A day that is older than is kept, and what becomes of it."""

    table: str
    day: date
    rows: int | None
    bytes: int
    fate: Fate
    reason: str


class Reconcile(MessageFilter):
    """What to compare."""

    since: Annotated[Text, Field(max_length=50, description="Sent at or after: a moment, or so long ago: 2h")]
    until: Annotated[Text | None, Field(max_length=50)] = None
    message_ids: Annotated[tuple[UUID, ...], Field(max_length=MOST)] = ()
    consumer: Annotated[
        tuple[Text, ...], Field(max_length=100, description="All that the inbox knows unless given.")
    ] = ()
    grace: Annotated[Text, Field(max_length=50)] = "60s"
    unique_business_key: bool = False
    limit: Limit = 20


@router.get("/retention", operation_id="retention_list", tags=["retention"])
def look(settings: Configured, _: Viewer, _alone: Alone, asked: Annotated[Keeps, Query()]) -> list[RetentionDay]:
    """List the days that are older than is kept, and what is in the way of a drop."""
    return _days(look_at_old_days(settings.database, keeps_of(settings.relay, asked.keep, asked.keep_inbox)))


@router.post("/retention", operation_id="retention_drop", tags=["retention"], response_model=list[RetentionDay])
def drop(settings: Configured, once: Once, who: Owner, _: Alone, asked: RetentionDrop) -> Response:
    """Drop the days that are older than is kept, as a running relay does each hour."""
    keeps = keeps_of(settings.relay, asked.keep, asked.keep_inbox)
    if not keeps:
        raise UsageError('retention is off: "keep": "14 days" tells what to keep')
    return once.noted(
        who.name, list[RetentionDay], lambda: _days(drop_old_days(settings.database, keeps, by=who.name, why=asked.why))
    )


@router.get("/topology", operation_id="topology_list", tags=["topology"])
def listed(settings: Configured, _: Viewer) -> TopologySettings:
    """Return the exchanges, queues and bindings that the settings list."""
    return settings.topology


@router.get("/topology/definitions", operation_id="topology_definitions", tags=["topology"])
def as_definitions(settings: Configured, _: Viewer) -> dict[str, list[dict[str, Any]]]:
    """Return them in the form of RabbitMQ's definitions."""
    return dict(definitions(settings))


@router.get("/reconcile", operation_id="reconcile", tags=["reconcile"])
def reconcile(settings: Configured, _: Viewer, _alone: Alone, asked: Annotated[Reconcile, Query()]) -> ReconcileReport:
    """Compare what was sent with what consumers have applied, whose inbox is here or at console.inbox_url."""
    question = ReconcileRequest(
        since=asked.since,
        until=asked.until,
        message_ids=asked.message_ids,
        aggregate_type=asked.aggregate_type,
        aggregate_id=asked.aggregate_id,
        event_type=asked.event_type,
        consumers=asked.consumer,
        grace=asked.grace,
        with_repeated_keys=asked.unique_business_key,
        limit=asked.limit,
    )
    return compare_with_inbox(settings, question)


def _days(days: list[OldDay]) -> list[RetentionDay]:
    return [
        RetentionDay.model_validate({name: getattr(day, name) for name in RetentionDay.model_fields}) for day in days
    ]
