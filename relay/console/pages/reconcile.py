"""`/reconcile`: compare what was sent with what consumers have applied."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.console.given import Alone, Configured, Viewer, compare_with_inbox
from relay.console.pages.replay import Wanted
from relay.console.templates import page
from relay.errors import UsageError
from relay.operate.reconcile.ask import ReconcileRequest
from relay.operate.reconcile.report import ReconcileReport

router = APIRouter()

NAMED = 100  # missing messages; the page of replays takes as many by their ids


@router.get("/reconcile")
def reconcile(
    request: Request, settings: Configured, _: Viewer, _alone: Alone, wanted: Annotated[Wanted, Query()]
) -> HTMLResponse:
    """Show the form; with its first moment also what was found."""
    returned, report = None, None
    if wanted.since:
        question = ReconcileRequest(
            since=wanted.since,
            until=wanted.until or None,
            aggregate_type=wanted.type or None,
            aggregate_id=wanted.key or None,
            event_type=wanted.event or None,
            limit=NAMED,
        )
        try:
            wanted.check_moments()
            report = compare_with_inbox(settings, question)
        except UsageError as error:
            returned = wanted.returned(error)
    return page(
        request,
        "reconcile.html",
        code=422 if returned else 200,
        returned=returned,
        wanted=wanted,
        report=report,
        replay=report and _replay(report, wanted),
    )


def _replay(report: ReconcileReport, wanted: Wanted) -> str:
    """Return the address of the page that sends the missing messages again; if they are many, with their time's."""
    given = {"since": report.since.isoformat(), "until": report.expected_until.isoformat()}
    named = {each.message_id: None for consumer in report.consumers for each in consumer.missing_first}
    if len(named) <= NAMED and all(each.missing == len(each.missing_first) for each in report.consumers):
        return "/replay?" + urlencode({**given, "id": " ".join(map(str, named))})
    return "/replay?" + urlencode({**wanted.model_dump(include={"type", "key", "event"}), **given})
