"""`/messages`: look for messages; one message with its way, which follows it; what it says, once it is revealed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Form, Path, Query
from pydantic import BaseModel, ConfigDict, field_validator
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.access.identity import Identity
from relay.console.forms import TOKEN_FORM, Forms, returned_form, said
from relay.console.given import FormWords, Here, Once, Operator, Sessions, Viewer
from relay.console.looks import Look
from relay.console.pages.failures import GroupPart, ask_first
from relay.console.site import Site, site_of
from relay.console.templates import fragment, page
from relay.errors import OutboxError, UsageError
from relay.jobs.job import Kind
from relay.operate.asked import QueueName, RowName
from relay.operate.failures import Group
from relay.operate.jobs import ROLES, Ordered
from relay.operate.letters import asked as letters
from relay.operate.messages.look import MessageState, Place, Search, search
from relay.operate.messages.message import (
    Audited,
    AwaitedRoute,
    Content,
    FoundMessage,
    HeldBack,
    Located,
    NotLocated,
    find_message,
    read_audit,
    read_awaited_route,
    read_held,
    read_message,
    read_outcome,
    reveal_message,
)
from relay.operate.messages.text import indented, shown
from relay.operate.messages.whereabouts import row_id, whereabouts
from relay.operate.operation import Role
from relay.operate.parked import asked as parked
from relay.operate.parked.read import Parked, ParkedSelection, first_parked
from relay.operate.routes import asked as quarantine
from relay.operate.routes.quarantine import route_group
from relay.operate.sent.moment import parse_interval
from relay.operate.sent.selection import now
from relay.runtime.scrub import scrub
from relay.servers.postgres.tables import Tables

router = APIRouter()

PARTS = ("head", "way", "row", "acts")  # of a message's page, each with a template; they follow the row
NEWS_WITHIN = 0.3  # seconds to look for a row that has moved on
DOWNLOADED = 64 * 1024 * 1024  # bytes of a payload at most
CHANGES = {MessageState.PARKED: (Kind.RETRY, Kind.ARCHIVE, Kind.DISCARD)}

Row = Annotated[RowName, Path()]
At = Annotated[str, Form(max_length=100)]


class SearchFilters(BaseModel):
    """The filters of the form; what is empty selects nothing away."""

    model_config = ConfigDict(extra="ignore")

    state: MessageState | Literal[""] = ""
    id: str = ""
    type: str = ""
    key: str = ""
    event: str = ""
    since: str = ""
    until: str = ""
    after: str = ""

    @field_validator("id", "type", "key", "event", "since", "until", "after")
    @classmethod
    def _storable(cls, text: str) -> str:
        if "\0" in text or len(text) > 1000:
            raise ValueError("no text that a message can have")
        return text.strip()

    def search(self, moment: datetime) -> Search:
        """Return what is looked for, by a clock that shows `moment`.

        Raises:
            UsageError: an id or a time cannot be read.
        """
        since, until = parse_interval(
            self.since or None, self.until or None, moment, names=("From", "Before"), zone=UTC
        )
        return Search(
            state=self.state or None,
            row=row_id(self.id) if self.id else None,
            aggregate_type=self.type or None,
            aggregate_id=self.key or None,
            event_type=self.event or None,
            since=since,
            until=until,
        )

    def address(self, **changed: str) -> str:
        """Return the address of the page with these filters, and others changed."""
        given = {**self.model_dump(mode="json", exclude={"after"}), **changed}
        return "/messages?" + urlencode({name: value for name, value in given.items() if value})


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a message's way.

    Attributes:
        link: an address, and what it leads to.
    """

    mood: str
    words: str
    at: datetime | None = None
    detail: str = ""
    link: tuple[str, str] | None = None


@router.get("/messages")
def list_messages(
    request: Request, database: Sessions, _: Viewer, filters: Annotated[SearchFilters, Query()]
) -> HTMLResponse:
    """Show a page of messages."""
    words, found = "", None
    with database.session() as tables:
        try:
            wanted = filters.search(now(tables.connection))
            found = search(tables, wanted, after=filters.after or None)
        except UsageError as error:
            words = str(error)
    return page(
        request, "messages.html", code=422 if words else 200, filters=filters, states=list(MessageState), found=found,
        words=words,
    )  # fmt: skip


@router.get("/messages/{row}")
def show_message(
    request: Request, database: Sessions, who: Viewer, *, row: Row, at: str = "", after: str = ""
) -> HTMLResponse:
    """Show one message by its id or message id, wherever it is, without what it says."""
    named = row_id(row)
    with database.session() as tables:
        found = find_message(tables, named, _place(at), after=after or None)
        if isinstance(found, NotLocated):
            return _missing(request, named, found)
        values = _values(request, tables, found, who)
    return page(request, "message.html", **values, seen=_seen(values), content=None)


@router.get("/messages/{row}/news")
def news(request: Request, database: Sessions, who: Viewer, *, row: Row, at: str = "", seen: str = "") -> Response:
    """Return the parts of a message's page that are not as the browser has `seen` them; 204 when all are."""
    named = row_id(row)
    with database.session() as tables:
        found = find_message(tables, named, _place(at), seconds=NEWS_WITHIN)
        if isinstance(found, NotLocated):
            return Response(status_code=HTTPStatus.NO_CONTENT)
        values = _values(request, tables, found, who)
    current = _seen(values)
    known = seen.split("-")
    changed = [part for part, digest in zip(PARTS, current.split("-"), strict=True) if digest not in known]
    if not changed:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return page(request, "message_news.html", **values, seen=current, changed=changed)


@router.post("/messages/{row}/reveal")
def reveal(
    request: Request, database: Sessions, who: Operator, *, row: Row, at: At = "", why: FormWords = ""
) -> HTMLResponse:
    """Show what a message says; the audit notes who has read it."""
    named = row_id(row)
    with database.session() as tables:
        found = read_message(tables, named, _place(at))
        content = reveal_message(tables, found, by=who.name, why=why or None)
        values = _values(request, tables, found, who)
    return page(
        request, "message.html", **values, seen=_seen(values), content=_shown(found.message, content),
        headers=indented(content.headers or ""), why=why,
    )  # fmt: skip


@router.post("/messages/{row}/download")
def download(database: Sessions, who: Operator, *, row: Row, at: At = "", why: FormWords = "") -> Response:
    """Return the payload of a message as a file; the audit notes who has read it."""
    named = row_id(row)
    with database.session() as tables:
        found = read_message(tables, named, _place(at))
        message = found.message
        if (size := message.payload_bytes or 0) > DOWNLOADED:
            raise UsageError(f"the payload has {size:,} bytes, and a download at most {DOWNLOADED:,}: read it by psql")
        content = reveal_message(tables, found, by=who.name, why=why or None, length=2**31 - 1)
    body = content.payload.encode() if content.payload is not None else content.payload_bytes or b""
    kind, ending = ("application/json", "json") if message.is_json else ("application/octet-stream", "bin")
    named_file = f'attachment; filename="message-{message.message_id}.{ending}"'
    return Response(body, media_type=kind, headers={"Content-Disposition": named_file})


@router.post("/messages/{row}/jobs")
def change(
    site: Here,
    database: Sessions,
    who: Operator,
    once: Once,
    *,
    row: Row,
    kind: Annotated[Literal[Kind.RETRY, Kind.ARCHIVE, Kind.DISCARD], Form()],
    why: FormWords = "",
) -> Response:
    """Order a job over this one parked row; the page follows it. A discard asks first, on its page."""
    named = row_id(row)
    who.require(ROLES[kind])
    with database.session() as tables:
        message = read_message(tables, named).message
        if kind is Kind.DISCARD and not head_of(tables, message):
            raise UsageError(f"message {message.message_id}: {whereabouts(tables, [named])[named]}")
    if kind is Kind.DISCARD:
        return ask_first(str(message.group), GroupPart(part=True, id=(str(message.id),), why=why))
    asked = parked.RetryParked.model_construct(ids=(str(message.id),), why=why if kind is Kind.RETRY else said(why))
    site.change(parked.CHANGES[kind], asked, who, once, check=_refuse_other_state)
    return _back(message)


@router.post("/messages/{row}/letters")
def change_letter(
    site: Here,
    database: Sessions,
    who: Operator,
    once: Once,
    *,
    row: Row,
    kind: Annotated[Literal[Kind.RETRY, Kind.DISCARD], Form()],
    queue: Annotated[QueueName, Form()],
    at: At = "",
    why: FormWords = "",
) -> Response:
    """Order a job over the dead letter of this message. A discard asks first, on its page."""
    named = row_id(row)
    who.require(ROLES[kind])
    with database.session() as tables:
        message_id = str(read_message(tables, named, _place(at)).message.message_id)
    if kind is Kind.DISCARD:
        groups = [group for look, group in site.looks.of_message(message_id) if look.queue == queue]
        if not groups:
            raise UsageError(f"look at {queue} again: no dead letter of the message is known there")
        return ask_first(groups[0].id, GroupPart(queue=queue, part=True, id=(message_id,), why=why))
    asked = letters.RetryLetters.model_construct(queue=queue, message_ids=(message_id,), why=said(why))
    return site.order(letters.CHANGES[kind], asked, who, once)


@router.post("/messages/{row}/probe")
def probe(site: Here, database: Sessions, who: Operator, row: Row) -> Response:
    """Ask the relays to try now the route that this row waits for."""
    named = row_id(row)
    with database.session() as tables:
        message = read_message(tables, named).message
    if message.quarantine is not None:  # else it has gone on by now
        site.do(quarantine.probe, quarantine.Probe(routes=(message.quarantine,)), who)
    return _back(message)


def _refuse_other_state(ordered: Ordered) -> None:
    if ordered.not_found:
        raise UsageError(ordered.not_found[0])


def _values(request: Request, tables: Tables, found: Located, who: Identity) -> dict[str, Any]:
    """Return what the templates of a message's page take."""
    site, message = site_of(request), found.message
    is_writable = not site.settings.console.read_only
    dead = site.looks.of_message(str(message.message_id))
    can_change = is_writable and who.role.includes(Role.OPERATOR)
    head, route = head_of(tables, message), read_awaited_route(tables, message)
    kinds = CHANGES.get(message.state, ()) if can_change and head else ()
    at = str(found.place or "")
    address = f"/messages/{message.message_id}" + (f"?{urlencode({'at': at})}" if at else "")
    return {
        "base": site.settings.console.base,
        "forms": Forms(address, returned_form(request)),
        "message": message,
        "at": at,
        "others": found.others,
        "steps": _steps(site, message, read_audit(tables, message), dead),
        "head": head,
        "route": route,
        "group": message.group if head else _group_of(route) if route else None,
        "letters": dead,
        "kinds": [kind for kind in kinds if who.role.includes(ROLES[kind])],
        "letter_kinds": [kind for kind in (Kind.RETRY, Kind.DISCARD) if can_change and who.role.includes(ROLES[kind])],
        "can_reveal": can_change,
        "can_edit": bool(head) and is_writable and who.role.includes(parked.edit.role),
    }


def _seen(values: dict[str, Any]) -> str:
    """Return what tells each part from what it was before."""
    texts = (f"{part}{fragment(f'message_{part}.html', **values)}" for part in PARTS)
    plain = (TOKEN_FORM.sub("", text) for text in texts)  # each form has a new token
    return "-".join(hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12] for text in plain)


def head_of(tables: Tables, message: FoundMessage) -> Parked | None:
    """Return the parked row, unless it only waits behind another one."""
    if message.state is not MessageState.PARKED:
        return None
    rows = first_parked(tables, ParkedSelection(ids=[message.id], limit=1), with_held=False)
    return rows[0] if rows else None


def _group_of(route: AwaitedRoute) -> str | None:
    return None if route.paused_at else route_group(route.reason, route.exchange)


def _missing(request: Request, named: int | UUID, found: NotLocated) -> HTMLResponse:
    """Return the page of a message of which no row was found, with what is known of it all the same."""
    steps: list[Step] = []
    if isinstance(named, UUID):
        site = site_of(request)
        steps = _of_letters(site.looks.of_message(str(named)))
        try:
            with site.inbox.session() as tables:
                steps += _of_held(read_held(tables, named))
        except OutboxError as error:
            steps.append(Step("warning", "what consumers hold is not known", None, scrub(str(error))))
    return page(request, "message_missing.html", code=404, named=named, found=found, steps=steps)


def _steps(
    site: Site, message: FoundMessage, audited: Sequence[Audited], dead: Sequence[tuple[Look, Group]]
) -> list[Step]:
    """Return the way of a message: row, broker, inbox, dead letter."""
    steps = [*_of_outbox(message), *_of_consumers(site, message, dead), *map(_of_audit, audited)]
    return sorted(steps, key=lambda step: (step.at is None, step.at or message.created_at))


def _of_outbox(message: FoundMessage) -> list[Step]:
    steps = [Step("ok", f"written into lane {message.lane}", message.created_at, message.writer or "")]
    if message.edit_of:
        steps.append(Step("ok", "an edited copy", message.created_at, "", _link_to(message.edit_of, "of this message")))
    match message.state:
        case MessageState.PENDING:
            tried = f"tried {message.attempts} times; {message.last_error or ''}" if message.attempts else ""
            steps.append(Step("warning", "waits to be sent", message.available_at, tried))
        case MessageState.PARKED:
            behind = _link_to(message.held_behind, f"behind {message.held_behind}") if message.held_behind else None
            steps.append(Step("failed", "parked", message.parked_at, message.last_error or "", behind))
        case MessageState.QUARANTINED:
            words = f"waits for route {message.quarantine}"
            steps.append(Step("failed", words, message.parked_at, message.last_error or "", ("/routes", "see routes")))
        case MessageState.ARCHIVED | MessageState.DISCARDED if message.parked_at:  # the audit's step says by whom
            steps.append(Step("failed", "parked", message.parked_at, message.last_error or ""))
        case MessageState.ARCHIVED | MessageState.DISCARDED:
            steps.append(Step("failed", str(message.state), None, message.last_error or ""))
        case MessageState.SENT:
            steps.append(Step("ok", "confirmed by the broker, and marked as sent", message.sent_at))
    return steps


def _of_consumers(site: Site, message: FoundMessage, dead: Sequence[tuple[Look, Group]]) -> list[Step]:
    steps = _of_letters(dead)
    try:
        with site.inbox.session() as tables:
            outcome = read_outcome(tables, message)
    except OutboxError as error:
        return [*steps, Step("warning", "what consumers have done with it is not known", None, scrub(str(error)))]
    steps += [Step("ok", f"applied by {each.consumer}", each.at) for each in outcome.applied]
    steps += _of_held(outcome.held)
    if message.state == MessageState.SENT and not steps:
        steps.append(Step("skipped", "no inbox here has it", None, "a consumer may have another database"))
    return steps


def _of_letters(dead: Sequence[tuple[Look, Group]]) -> list[Step]:
    return [
        Step("failed", f"in {look.queue}, when it was looked at", look.at, group.cause, _link_to_group(group.id))
        for look, group in dead
    ]


def _of_held(held: Sequence[HeldBack]) -> list[Step]:
    return [
        Step(
            "warning",
            f"held by {each.consumer} after {each.attempts} tries",
            each.since,
            each.reason or "",
            _link_to_group(each.group) if each.attempts else None,
        )
        for each in held
    ]


def _of_audit(deed: Audited) -> Step:
    link = None
    if deed.sent_as:
        link = _link_to(deed.sent_as, "sent as this message")
    elif deed.job:
        link = (f"/jobs/{deed.job}", f"job {deed.job}")
    return Step("warning", f"{deed.command}, by {deed.by}", deed.at, deed.why or "", link)


def _link_to(row: int | UUID, words: str) -> tuple[str, str]:
    return f"/messages/{row}", words


def _link_to_group(group: str) -> tuple[str, str]:
    return f"/failures/{group}", "see its failure group"


def _shown(message: FoundMessage, content: Content) -> Any:
    """Return the payload as text, with all that was read of it."""
    read = len(content.payload.encode(errors="replace")) if content.payload else len(content.payload_bytes or b"")
    return shown(content.payload, content.payload_bytes, is_whole=read >= (message.payload_bytes or 0))


def _back(message: FoundMessage) -> Response:
    return RedirectResponse(f"/messages/{message.message_id}", HTTPStatus.SEE_OTHER)


def _place(text: str) -> Place | None:
    return Place.of(text) if text else None
