"""`/`: whether all is well, and what is in the way; `/live` sends it again each second."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse

from relay.console.access.identity import Identifier, Identity, Role, require
from relay.console.charts import Chart, chart
from relay.console.checkup import Report
from relay.console.formats import duration, short
from relay.console.sampler import Point, Sample, Sampler
from relay.console.templates import fragment, page
from relay.console.verdict import verdict

EVENT = "figures"
FIRST_LOOK = 3.0  # seconds for the first page; it shows that the console still looks then
SHORTEST = 300.0  # seconds that a chart spans at least

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its last hour."""

    title: str
    value: str
    about: str
    chart: Chart | None
    highest: str
    span: str  # of the chart


@dataclass(frozen=True, slots=True)
class Drawn:
    """The figures as every browser gets them."""

    sample: Sample | None
    report: Report | None
    text: str


@router.get("/")
async def overview(request: Request, _: Annotated[Identity, Depends(require(Role.VIEWER))]) -> HTMLResponse:
    """Show the state of the outbox in words, then its figures."""
    if _sampler(request).latest is None:  # the console has just started
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK), aclosing(_sampler(request).samples()) as samples:
                await anext(samples, None)
    return page(request, "overview.html", figures=_figures(request))


@router.get("/live")
async def live(request: Request, _: Annotated[Identity, Depends(require(Role.VIEWER))]) -> StreamingResponse:
    """Send the figures as they change, until the browser leaves or the user may no longer see them."""
    return StreamingResponse(_events(request), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _events(request: Request) -> AsyncIterator[str]:
    identify: Identifier = request.app.state.identify
    async for _ in _sampler(request).samples():
        if await identify(request) is None:
            return
        yield f"event: {EVENT}\n" + "".join(f"data: {line}\n" for line in _figures(request).splitlines()) + "\n"


def _figures(request: Request) -> str:
    """Return the part of the page that changes, drawn once for all browsers."""
    sample, report = _sampler(request).latest, request.app.state.checkup.latest
    drawn: Drawn | None = getattr(request.app.state, "drawn", None)
    if drawn is None or drawn.sample is not sample or drawn.report is not report:
        values = {"sample": sample, "verdict": verdict(sample, report), "figures": _told(sample)}
        drawn = Drawn(sample, report, fragment("figures.html", **values))
        request.app.state.drawn = drawn
    return drawn.text


def _told(sample: Sample | None) -> list[Figure]:
    status, latency = (sample.status, sample.latency) if sample else (None, None)
    history = sample.history if sample else ()
    oldest = status.oldest_pending_age_s if status else None
    rows = [
        ("Backlog", short(status.pending if status else None), "rows wait", lambda each: each.backlog, short),
        ("Oldest", duration(oldest), "waits", lambda each: each.age_s, duration),
        ("Sent", short(sample.rate if sample else None), "a second", lambda each: each.rate, short),
        ("Latency", duration(latency.p95_s if latency else None), "95% of the last minute",
         lambda each: each.latency_s, duration),
        ("Set aside", short(status.parked + status.quarantined if status else None), "parked or quarantined",
         lambda each: each.failures, short),
    ]  # fmt: skip
    return [_figure(title, value, about, history, of=of, words=words) for title, value, about, of, words in rows]


def _figure(
    title: str,
    value: str,
    about: str,
    history: tuple[Point, ...],
    *,
    of: Callable[[Point], float | None],
    words: Callable[[float | None], str],
) -> Figure:
    since, until = (history[0].at, history[-1].at) if history else (0.0, 0.0)
    points = [(point.at, found) for point in history if (found := of(point)) is not None]
    since = min(since, until - SHORTEST)  # a curve of a few seconds would look like a cliff
    drawn = chart(points, since=since, until=until)
    return Figure(title, value, about, drawn, words(drawn.highest) if drawn else "", duration(until - since))


def _sampler(request: Request) -> Sampler:
    return cast(Sampler, request.app.state.sampler)
