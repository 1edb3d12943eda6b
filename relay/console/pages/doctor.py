"""`/doctor`: the checklist."""

from itertools import groupby

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

from relay.console.given import Viewer
from relay.console.site import site_of
from relay.console.templates import page
from relay.operate.doctor.finding import Verdict, summary

router = APIRouter()


@router.get("/doctor")
async def doctor(request: Request, _: Viewer, again: bool = False) -> HTMLResponse:
    """Show what the doctor has found; with `again` it looks now."""
    report = await site_of(request).checkup.report(newest=again)
    urgent = [each for each in report.findings if each.verdict in (Verdict.FAILED, Verdict.WARNING)]
    urgent.sort(key=lambda each: each.verdict is not Verdict.FAILED)
    rest = [each for each in report.findings if each not in urgent]
    parts = [(part, list(found)) for part, found in groupby(rest, key=lambda each: each.part)]
    return page(
        request, "doctor.html", report=report, urgent=urgent, parts_found=parts, summary=summary(report.findings)
    )
