"""`/messages/{row}/edit`: edit a parked message in a form, see what changed, and send it as a new one."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Literal
from uuid import UUID, uuid4

from fastapi import APIRouter, Form
from pydantic import BaseModel, ConfigDict, field_validator
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from relay.console.forms import said
from relay.console.given import Here, Owner, Sessions
from relay.console.pages.messages import Row, head_of
from relay.console.templates import page
from relay.errors import UsageError
from relay.operate.asked import Words
from relay.operate.messages.message import Content, FoundMessage, read_message, reveal_message
from relay.operate.messages.text import changes, indented, text_of
from relay.operate.messages.whereabouts import row_id, whereabouts
from relay.operate.parked import asked as parked
from relay.operate.parked.edit import Edit, check_edit, parse_headers

router = APIRouter()

EDITABLE = 256 * 1024  # bytes of a payload in a form, of which a request may have four times as many


class EditForm(BaseModel):
    """What an operator has typed, and what comes next.

    Attributes:
        act: open the form, look at what changed, go back to the form, or send it.
        payload: None where it cannot be edited in a form.
        message_id: of the copy, so that a form that is sent twice sends one.
    """

    model_config = ConfigDict(extra="ignore")

    act: Literal["open", "review", "edit", "send"] = "open"
    payload: str | None = None
    headers: str | None = None
    old: Literal["discard", "keep"] = "discard"
    why: Words = ""
    message_id: UUID | None = None

    @field_validator("payload", "headers")
    @classmethod
    def _as_typed(cls, text: str | None) -> str | None:
        return None if text is None else text.replace("\r\n", "\n")  # as browsers send each end of a line


@dataclass(frozen=True, slots=True)
class Editable:
    """What a row says, as an operator edits it.

    Attributes:
        payload: None: bytes that are no text, or too long for a form.
        headers: None: too long for a form.
    """

    payload: str | None
    headers: str | None
    is_json: bool

    @classmethod
    def of(cls, message: FoundMessage, content: Content) -> "Editable":
        payload, headers = content.payload, indented(content.headers or "")
        if payload is not None:
            payload = indented(payload)
        elif content.payload_bytes is not None:
            payload = text_of(content.payload_bytes)
        is_long = (message.payload_bytes or 0) > EDITABLE or len((payload or "").encode(errors="replace")) > EDITABLE
        return cls(None if is_long else payload, None if len(headers) > EDITABLE else headers, message.is_json)

    def changed(self, form: EditForm) -> Edit:
        """Return what was edited: a payload or headers with other blanks between the values are as they were.

        Raises:
            EditRefusedError: the headers are no JSON object.
        """
        payload, headers, before = form.payload, form.headers, self.payload or ""
        if payload is not None and self._plain(payload) == self._plain(before.replace("\r\n", "\n")):
            payload = None
        elif payload is not None and 0 < before.count("\r\n") == before.count("\n"):
            payload = payload.replace("\n", "\r\n")
        if headers is not None and indented(headers) == (self.headers or ""):
            headers = None
        return Edit(payload=payload, headers=None if headers is None else parse_headers(headers.strip() or "{}"))

    def _plain(self, text: str) -> str:
        return indented(text) if self.is_json else text


@router.post("/messages/{row}/edit")
def edit(
    request: Request, site: Here, database: Sessions, who: Owner, *, row: Row, form: Annotated[EditForm, Form()]
) -> Response:
    """Edit a parked row in a form, see what changed, and send it as a new message."""
    named = row_id(row)
    with database.session() as tables:
        found = read_message(tables, named)
        message, head = found.message, head_of(tables, found.message)
        if head is None:
            raise UsageError(
                f"message {message.message_id} cannot be edited: {whereabouts(tables, [message.id])[message.id]}"
            )
        content = reveal_message(tables, found, by=who.name, why=form.why or None, length=EDITABLE, is_noted_once=True)
    old = Editable.of(message, content)
    if form.act == "open":
        form = EditForm(payload=old.payload, headers=old.headers, why=form.why, message_id=uuid4())
    problem: UsageError | None = None
    lines: list[tuple[str, list[str]]] = []
    try:
        if form.act in ("review", "send"):
            new = old.changed(form)
            most = site.settings.relay.max_message_bytes
            check_edit(message, new, is_json=message.is_json, most_bytes=most)
            lines = _lines(old, form, new)
        if form.act == "send":
            asked = parked.EditParked(
                row=str(message.id), payload=new.payload, headers=new.headers, discard=form.old == "discard",
                message_id=form.message_id, why=said(form.why),
            )  # fmt: skip
            sent = site.do(parked.edit, asked, who)
            return RedirectResponse(f"/messages/{sent.message_id}", HTTPStatus.SEE_OTHER)
    except UsageError as error:
        problem = error
    return page(
        request, "message_edit.html", code=422 if problem else 200, message=message, head=head, form=form, old=old,
        lines=lines, problem=problem, field=getattr(problem, "field", None), most=EDITABLE,
    )  # fmt: skip


def _lines(old: Editable, form: EditForm, new: Edit) -> list[tuple[str, list[str]]]:
    """Return the lines that differ, of the headers and of the payload."""
    found = []
    if new.headers is not None:
        found.append(("Headers", changes(old.headers or "", indented(form.headers or "{}"))))
    if new.payload is not None and form.payload is not None:
        text = indented(form.payload) if old.is_json else form.payload
        found.append(("Payload", changes(old.payload or "", text)))
    return found
