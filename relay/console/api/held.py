"""`/held`: messages that consumers hold, to be tried again; `/failures?held=true` lists their groups."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from relay.console.api.once import Once
from relay.console.api.parameters import Closed, Group, Reasoned, check_choice
from relay.console.given import Operator, within

router = APIRouter(prefix="/held", tags=["held"])


class Retry(Reasoned):
    """Which messages to try now, and why."""

    group: Group = None
    all: Annotated[bool, Field(description="Of every group; needed when no group is given.")] = False


class Retried(Closed):
    """How many messages are due now; what waits behind them follows."""

    messages: int


@router.post("/retry", response_model=Retried)
def retry(request: Request, once: Once, who: Operator, asked: Retry) -> Response:
    """Let the consumers try what failed now, in place of waiting for the next try."""
    check_choice(is_filtered=asked.group is not None, is_all=asked.all)
    return once.in_transaction(
        who.name,
        Retried,
        lambda connection: Retried(
            messages=within(request, connection).retry_held(asked.group, by=who.name, why=asked.why)
        ),
    )
