"""`/icon/{mood}.svg`: how the outbox is, as a colour and a shape, with the first letter of the environment."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from relay.console.site import site_of
from relay.console.templates import fragment
from relay.console.verdict import Mood

router = APIRouter()


@router.get("/icon/{mood}.svg")
def icon(request: Request, mood: Mood) -> Response:
    """Return the icon of a mood; anybody may see it, and it does not tell which mood holds."""
    letter = site_of(request).place().environment[:1].upper()
    text = fragment("icon.svg", mood=mood, letter=letter)
    return Response(text, media_type="image/svg+xml", headers={"Cache-Control": "max-age=300"})
