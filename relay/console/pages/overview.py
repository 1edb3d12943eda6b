"""`/`: whether all is well, and what is in the way; `/live` sends it again each second."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse

from relay.console.access.identity import Identifier
from relay.console.charts import Chart, chart
from relay.console.checkup import Report
from relay.console.consumers import Seen
from relay.console.formats import duration, short
from relay.console.given import Viewer
from relay.console.sampler import Point, Sample, Sampler
from relay.console.templates import fragment, page
from relay.console.verdict import verdict

PARTS = ("verdict", "figures", "relays")  # each has a template, and is an event of the stream
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
    """What every browser gets: the text of each part by its name."""

    sample: Sample | None
    report: Report | None
    seen: Seen | None
    failing: list[str]
    parts: dict[str, str]


@router.get("/")
async def overview(request: Request, _: Viewer) -> HTMLResponse:
    """Show the state of the outbox in words, then its figures."""
    if _sampler(request).latest is None:  # the console has just started
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK), aclosing(_sampler(request).samples()) as samples:
                await anext(samples, None)
    return page(request, "overview.html", parts=_drawn(request).parts)


@router.get("/live")
async def live(request: Request, _: Viewer) -> StreamingResponse:
    """Send the figures as they change, until the browser leaves or the user may no longer see them."""
    return StreamingResponse(_events(request), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _events(request: Request) -> AsyncIterator[str]:
    """Yield the parts that have changed: a part that stays is left alone, and keeps the focus of the keyboard."""
    identify: Identifier = request.app.state.identify
    seen: dict[str, str] = {}
    async for _ in _sampler(request).samples():
        if await identify(request) is None:
            return
        parts = _drawn(request).parts
        for name in PARTS:
            if seen.get(name) != parts[name]:
                yield f"event: {name}\n" + "".join(f"data: {line}\n" for line in parts[name].splitlines()) + "\n"
        seen = parts


def _drawn(request: Request) -> Drawn:
    """Return the parts of the page that change, drawn once for all browsers."""
    sample, report = _sampler(request).latest, request.app.state.checkup.latest
    seen: Seen | None = request.app.state.consumers.latest
    failing = request.app.state.background.failing()
    drawn: Drawn | None = getattr(request.app.state, "drawn", None)
    if drawn is None or drawn != replace(drawn, sample=sample, report=report, seen=seen, failing=failing):
        values = {"sample": sample, "verdict": verdict(sample, report, seen, failing), "figures": _told(sample)}
        drawn = Drawn(sample, report, seen, failing, {name: fragment(f"{name}.html", **values) for name in PARTS})
        request.app.state.drawn = drawn
    return drawn


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
