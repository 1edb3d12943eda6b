"""`/dead-letters/export`, whose answer is a file; relay/operate/letters/asked.py has the other requests."""

import asyncio
from io import BytesIO

from fastapi import APIRouter
from starlette.responses import Response

from relay.console.given import Configured, Operator, Sessions
from relay.operate.letters.asked import ExportLetters
from relay.operate.letters.export import export
from relay.operate.letters.work import queues_of
from relay.operate.messages.message import note_reveal

router = APIRouter(prefix="/dead-letters", tags=["dead-letters"])


@router.post(
    "/export",
    operation_id="dead_letters_export",
    response_class=Response,
    responses={200: {"description": "One letter a line.", "content": {"application/jsonl": {}}}},
)
def export_(settings: Configured, database: Sessions, who: Operator, asked: ExportLetters) -> Response:
    """Return letters as JSON Lines, by a look at the queue; the audit notes who read it."""
    _, dead = queues_of(asked.queue)
    lines = BytesIO()
    asyncio.run(export(settings.broker, dead, asked.selection(asked.limit), lines))
    with database.session() as tables:
        note_reveal(tables, dead, by=who.name, why=asked.why.strip() or None)
    return Response(lines.getvalue(), media_type="application/jsonl")
