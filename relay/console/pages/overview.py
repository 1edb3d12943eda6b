"""`/`: whether all is well, and what is in the way; `/live` sends it again each second."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse

from relay.console.access.identity import Identifier, Identity, Role, require
from relay.console.charts import Chart, chart
from relay.console.formats import duration, short
from relay.console.sampler import KEPT, Point, Sample, Sampler
from relay.console.templates import fragment, page
from relay.console.verdict import verdict

EVENT = "figures"

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its last hour."""

    title: str
    value: str
    about: str
    chart: Chart | None
    highest: str


@router.get("/")
def overview(request: Request, _: Annotated[Identity, Depends(require(Role.VIEWER))]) -> HTMLResponse:
    """Show the state of the outbox in words, then its figures."""
    return page(request, "overview.html", figures=_figures(_sampler(request).latest))


@router.get("/live")
async def live(request: Request, _: Annotated[Identity, Depends(require(Role.VIEWER))]) -> StreamingResponse:
    """Send the figures as they change, until the browser leaves or the user may no longer see them."""
    return StreamingResponse(_events(request), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _events(request: Request) -> AsyncIterator[str]:
    identify: Identifier = request.app.state.identify
    async for sample in _sampler(request).samples():
        if await identify(request) is None:
            return
        yield f"event: {EVENT}\n" + "".join(f"data: {line}\n" for line in _figures(sample).splitlines()) + "\n"


_drawn: tuple[Sample | None, str] = (None, "")  # the last one: every browser gets the same


def _figures(sample: Sample | None) -> str:
    """Return the part of the page that changes, drawn once for all browsers."""
    global _drawn  # noqa: PLW0603
    if sample is None or _drawn[0] is not sample:
        _drawn = (sample, fragment("figures.html", sample=sample, verdict=verdict(sample), figures=_told(sample)))
    return _drawn[1]


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
    until = history[-1].at if history else 0.0
    points = [(point.at, found) for point in history if (found := of(point)) is not None]
    drawn = chart(points, since=until - KEPT, until=until)
    return Figure(title, value, about, drawn, words(drawn.highest) if drawn else "")


def _sampler(request: Request) -> Sampler:
    return cast(Sampler, request.app.state.sampler)
