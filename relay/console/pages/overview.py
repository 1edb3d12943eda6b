"""`/`: whether all is well, and what is in the way; `/live` sends it again each second."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse

from relay.console.given import Viewer
from relay.console.history import EventType, SentRoute
from relay.console.live import FRAME, PARTS
from relay.console.sent_curves import sent_curves
from relay.console.site import Site, site_of
from relay.console.templates import page, present

FIRST_LOOK = 3.0  # seconds for the first page; it shows that the console still looks then

Name = Annotated[str | None, Query(max_length=1000)]

router = APIRouter()


@router.get("/")
async def overview(
    request: Request,
    _: Viewer,
    event_type: Name = None,
    exchange: Name = None,
    routing_key: Name = None,
) -> HTMLResponse:
    """Show the state of the outbox in words, then its figures, and the curve of an event type or a route."""
    site = site_of(request)
    if site.sampler.latest is None:  # the console has just started
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK), aclosing(site.sampler.samples()) as samples:
                await anext(samples, None)
    chosen: EventType | SentRoute | None = None
    if event_type is not None:
        chosen = EventType(event_type)
    elif exchange is not None or routing_key is not None:
        chosen = SentRoute(exchange or "", routing_key or "")
    return page(request, "overview.html", parts=site.live.parts(), sent=sent_curves(site.history.hour, chosen))


@router.get("/live")
async def live(request: Request, _: Viewer, *, only_state: bool = False) -> StreamingResponse:
    """Send the parts as they change, or what each page shows, until the browser leaves or the user may not see them."""
    events = _events(request, site_of(request), FRAME if only_state else (*FRAME, *PARTS))
    return StreamingResponse(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _events(request: Request, site: Site, wanted: Sequence[str]) -> AsyncIterator[str]:
    """Yield the parts that have changed, each time with a beat; a part that stays keeps the focus of the keyboard."""
    seen: dict[str, str] = {}
    async for _ in site.sampler.samples():
        if await site.access.identify(request) is None:
            return
        parts = site.live.parts()
        changed = [name for name in wanted if seen.get(name) != parts[name]]
        yield _event("beat", present()) + "".join(_event(name, parts[name]) for name in changed)
        seen = parts


def _event(name: str, text: str) -> str:
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in text.split("\n")) + "\n"
