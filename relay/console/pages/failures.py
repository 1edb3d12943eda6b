"""`/failures`: what failed, grouped by its cause, and what an operator does with a whole group."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Form, Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay.console.access.identity import Identity
from relay.console.consumers import SeenConsumers
from relay.console.failure_groups import Counted
from relay.console.forms import InputError, address_of, said
from relay.console.given import FormWords, Here, Once, Operator, Owner, Sessions, Viewer
from relay.console.looks import Look
from relay.console.repeats import Repeatable
from relay.console.site import Site, site_of
from relay.console.templates import page
from relay.errors import DeadlineError, NotFoundError, UsageError
from relay.jobs.job import NO_CAUTION, Caution, Kind
from relay.operate import held
from relay.operate.asked import QUEUE_NAME, GroupId, QueueName, ShortString, Words
from relay.operate.failures import Group, Where, by_weight, read_group, with_retries
from relay.operate.jobs import ROLES
from relay.operate.letters import asked as letters
from relay.operate.letters.asked import RetryLetters
from relay.operate.letters.work import queues_of
from relay.operate.operation import Role
from relay.operate.parked import asked as parked
from relay.operate.parked.asked import RetryParked
from relay.operate.parked.read import ParkedSelection, first_parked
from relay.operate.parked.work import ParkedDone
from relay.operate.routes import asked as quarantine

router = APIRouter()

LISTED = 100  # groups
FEW = 3  # groups of one cause that have a row each; more are folded into one row
SHOWN = 20  # rows of a group
STAGED = Caution(stages=(1, 10, 100), stop_when_failing=0.05)
KINDS = {Where.PARKED: (Kind.RETRY, Kind.ARCHIVE, Kind.DISCARD), Where.DEAD_LETTER: (Kind.RETRY, Kind.DISCARD)}

Named = Annotated[tuple[QueueName, ...], Query(max_length=10)]


async def _counted(site: Here) -> Counted:
    return await site.failure_groups.counted()


CountedGroups = Annotated[Counted, Depends(_counted)]


@dataclass(frozen=True, slots=True)
class KnownQueue:
    """A queue of dead letters, as far as it is known."""

    queue: str
    number: int | None
    look: Look | None
    is_looked_at: bool  # now

    @property
    def has_changed(self) -> bool:
        """Whether letters came or went since the look."""
        return self.look is not None and self.look.letters != self.number


@dataclass(frozen=True, slots=True)
class FailureRow:
    """A row of the list: a group, or all groups of a cause.

    Attributes:
        group: of all its groups the sums.
        groups: how many; they differ by their event type.
        is_at_least: the look has not read all letters of the queue, so there may be more.
    """

    group: Group
    groups: int = 1
    is_at_least: bool = False

    @property
    def address(self) -> str:
        return f"/failures/{self.group.id}" if self.groups == 1 else f"/failures?under={self.group.id}"


class GroupPart(BaseModel):
    """A group, or a part of it, and why it changes."""

    model_config = ConfigDict(extra="ignore")

    why: Words = ""
    queue: Annotated[str, StringConstraints(pattern=f"^$|{QUEUE_NAME}")] = ""  # of letters; empty: parked rows
    part: bool = False  # only what the rest chooses
    id: Annotated[tuple[ShortString, ...], Field(max_length=SHOWN)] = ()  # of rows, or message ids of letters
    type: Words = ""
    key: Words = ""

    def check_part(self) -> None:
        """See that a part is chosen where a part is meant; InputError else."""
        if self.part != bool(self.id or self.type or self.key):
            raise InputError("key", "tick something or name a key for a part of the group; neither for all of it")

    @property
    def query(self) -> str:
        """The part as the query of an address."""
        given = self.model_dump(mode="json", include={*GroupPart.model_fields})
        return urlencode({name: value for name, value in given.items() if value}, doseq=True)

    def ordered(self, kind: Kind) -> "GroupOrder":
        """Return the order of a job over it."""
        return GroupOrder(kind=kind, **self.model_dump(include={*GroupPart.model_fields}))


class GroupOrder(GroupPart):
    """What a job does with a group, or with a part of it."""

    kind: Kind
    staged: bool = False

    def rows(self, group: str) -> RetryParked:
        """Return the parked rows that it means, and how they change."""
        return RetryParked.model_construct(
            group=group,
            ids=self.id,
            aggregate_type=self.type or None,
            aggregate_id=self.key or None,
            why=self.why,
            **asdict(self.caution),
        )

    @property
    def caution(self) -> Caution:
        """How carefully the job goes on."""
        return STAGED if self.staged and self.kind is Kind.RETRY else NO_CAUTION

    def letters(self, group: str) -> RetryLetters:
        """Return the dead letters that it means, and how they change."""
        return RetryLetters.model_construct(
            queue=self.queue,
            group=group,
            message_ids=self.id,
            aggregate_type=self.type or None,
            aggregate_id=self.key or None,
            why=self.why,
            **asdict(self.caution),
        )


@router.get("/failures")
def list_failures(
    request: Request,
    database: Sessions,
    counted: CountedGroups,
    who: Viewer,
    *,
    queue: Named = (),
    under: GroupId | None = None,
) -> HTMLResponse:
    """Show the groups of parked rows, of routes in quarantine, of held messages, and of dead letters once looked at.

    Many groups of one cause are one row; `under` names one of them, and shows a row for each of that cause.
    """
    queues = _queues(request, [queues_of(each)[1] for each in queue])
    looked_at = [group for each in queues if each.look and each.number for group in each.look.groups]
    with database.session() as tables:
        looked_at = with_retries(tables, looked_at)
    in_part = {group.place for group in looked_at if (look := _look_of(queues, group)) and look.read < look.letters}
    found = by_weight([*counted.groups, *looked_at])
    if under is not None:
        cause = _cause_of(read_group(found, under))
        found = [group for group in found if _cause_of(group) == cause]
    rows = _folded(found) if under is None else [FailureRow(group) for group in found]
    return page(
        request,
        "failures.html",
        rows=[replace(row, is_at_least=_is_letters(row.group) and row.group.place in in_part) for row in rows[:LISTED]],
        total=len(rows),
        groups=len(found),
        under=rows[0].group.cause if under else None,
        age_s=counted.age_s,
        queues=queues,
        unknown=seen.error if (seen := site_of(request).consumers.latest) else None,
        address=address_of(request),
        can_look=who.role.includes(Role.OPERATOR),
    )


@router.post("/failures/looks")
async def look(request: Request, _: Operator, queue: Annotated[QueueName, Form()]) -> Response:
    """Look at a queue of dead letters, in the background."""
    dead = queues_of(queue)[1]
    site_of(request).looks.begin(dead)
    return RedirectResponse(f"/failures?{urlencode({'queue': dead})}", HTTPStatus.SEE_OTHER)


@router.get("/failures/{group}")
def show_failure(
    request: Request, site: Here, database: Sessions, *, counted: CountedGroups, who: Viewer, group: str
) -> HTMLResponse:
    """Show a group with its first rows or letters, and what can be done."""
    look = next((each for each in site_of(request).looks.latest.values() if group in each.first), None)
    with database.session() as tables:
        groups = with_retries(tables, look.groups) if look else counted.groups
        found = read_group(groups, group)
        first = ParkedSelection(group=group, limit=SHOWN)
        is_parked = found.source is Where.PARKED
        rows = first_parked(tables, first, with_held=False) if is_parked else []
    return page(
        request,
        "failure.html",
        group=found,
        look=look,
        letters=look.first[group] if look else [],
        age_s=None if look else counted.age_s,
        rows=rows,
        routes=site.do(quarantine.list_, quarantine.ListRoutes(group=group), who)
        if found.source is Where.QUARANTINE
        else [],
        kinds=[kind for kind in KINDS.get(found.source, ()) if who.role.includes(ROLES[kind])],
        can_try=who.role.includes(Role.OPERATOR),
    )


@router.post("/failures/{group}/jobs")
def order(site: Here, who: Operator, once: Once, *, group: GroupId, asked: Annotated[GroupOrder, Form()]) -> Response:
    """Order a job over the group, or a part of it; the console runs it. A discard asks first, on its page."""
    source, kind = Where.DEAD_LETTER if asked.queue else Where.PARKED, asked.kind
    if kind not in KINDS[source]:
        raise UsageError(f"a group of what is {source} is changed by {', '.join(KINDS[source])}; not {kind}")
    who.require(ROLES[kind])
    asked.check_part()
    if kind is Kind.DISCARD:
        return ask_first(group, asked)
    if asked.queue or kind is Kind.ARCHIVE:
        said(asked.why)
    return _order(site, who, once, group=group, asked=asked)


def ask_first(group: str, asked: GroupPart) -> RedirectResponse:
    """Return the way to the page that asks before a group, or a part of it, is discarded."""
    return RedirectResponse(f"/failures/{group}/discard?{asked.query}", HTTPStatus.SEE_OTHER)


@router.get("/failures/{group}/discard")
def ask_to_discard(
    request: Request,
    site: Here,
    counted: CountedGroups,
    who: Owner,
    *,
    group: GroupId,
    asked: Annotated[GroupPart, Query()],
) -> HTMLResponse:
    """Show what a discard of the group, or of a part of it, would take."""
    asked.check_part()
    look = site.looks.latest.get(asked.queue)
    if not asked.queue:
        chosen = asked.ordered(Kind.DISCARD).rows(group)
        found = next((each for each in counted.groups if each.id == group), None)
        with site.database.session() as tables:
            rows = first_parked(tables, chosen.selection(SHOWN), with_held=False)
        return page(
            request,
            "discard.html",
            group=group,
            asked=asked,
            cause=found and found.cause,
            foreseen=_foreseen(site, who, chosen, found),
            rows=rows,
        )
    if look is None:
        raise UsageError(f"look at {asked.queue} first: what its letters say is not known")
    found = read_group(look.groups, group)
    return page(
        request,
        "discard.html",
        group=group,
        asked=asked,
        cause=found.cause,
        foreseen=None,
        found=found,
        look=look,
        letters=[
            letter
            for letter in look.first[group]
            if (not asked.id or letter.message_id in asked.id)
            and (not asked.type or letter.type == asked.type)
            and (not asked.key or letter.key == asked.key)
        ],
    )


def _foreseen(site: Site, who: Identity, chosen: RetryParked, group: Group | None) -> ParkedDone:
    """Return what a discard would do; for a large group as it was counted, where that takes too long."""
    try:
        return site.do(parked.preview, parked.PreviewParked.model_construct(kind=Kind.DISCARD, **chosen.filter), who)
    except DeadlineError:
        if group is None or chosen.ids or chosen.aggregate_type or chosen.aggregate_id:
            raise
        return ParkedDone(group.count, group.rows_held, [])


@router.post("/failures/{group}/discard")
def discard(site: Here, who: Owner, once: Once, *, group: GroupId, asked: Annotated[GroupPart, Form()]) -> Response:
    """Order a job that discards the group, or a part of it; the console runs it."""
    asked.check_part()
    said(asked.why)
    return _order(site, who, once, group=group, asked=asked.ordered(Kind.DISCARD))


def _order(site: Site, who: Identity, once: Repeatable | None, *, group: str, asked: GroupOrder) -> Response:
    if asked.queue:
        return site.order(letters.CHANGES[asked.kind], asked.letters(group), who, once)
    return site.order(parked.CHANGES[asked.kind], asked.rows(group), who, once)


@router.post("/failures/{group}/probe")
def probe(site: Here, who: Operator, group: str) -> Response:
    """Ask the relays to try the routes of the group now."""
    with suppress(NotFoundError):  # the routes work by now
        routes = site.do(quarantine.list_, quarantine.ListRoutes.model_construct(group=group), who)
        site.do(quarantine.probe, quarantine.Probe(routes=tuple(route.id for route in routes)), who)
    return RedirectResponse("/failures", HTTPStatus.SEE_OTHER)  # a group that is repaired has no page any more


@router.post("/failures/{group}/held")
def retry_held(site: Here, who: Operator, once: Once, *, group: GroupId, why: FormWords = "") -> Response:
    """Let the consumer try the held messages of the group now."""
    site.change(held.retry, held.RetryHeld(group=group, why=said(why)), who, once)
    site.consumers.wake()
    return RedirectResponse("/failures", HTTPStatus.SEE_OTHER)


def _cause_of(group: Group) -> tuple[str, str, str]:
    """Return what the groups of a cause have in common."""
    return (group.source, group.cause, group.place)


def _is_letters(group: Group) -> bool:
    return group.source is Where.DEAD_LETTER


def _look_of(queues: Sequence[KnownQueue], group: Group) -> Look | None:
    return next((each.look for each in queues if _is_letters(group) and each.queue == group.place), None)


def _folded(groups: Sequence[Group]) -> list[FailureRow]:
    """Return a row for each group, and one for many of the same cause, the largest first."""
    causes: dict[tuple[str, str, str], list[Group]] = {}
    for group in groups:
        causes.setdefault(_cause_of(group), []).append(group)
    rows: list[FailureRow] = []
    for same in causes.values():
        rows += [FailureRow(each) for each in same] if len(same) <= FEW else [FailureRow(_sum_of(same), len(same))]
    return sorted(rows, key=lambda row: -row.group.count)


def _sum_of(groups: Sequence[Group]) -> Group:
    return replace(
        groups[0],
        event_type="",
        count=sum(group.count for group in groups),
        first_at=min((group.first_at for group in groups if group.first_at), default=None),
        last_at=max((group.last_at for group in groups if group.last_at), default=None),
        keys_held=sum(group.keys_held for group in groups),
        rows_held=sum(group.rows_held for group in groups),
        retried=sum(group.retried for group in groups),
    )


def _queues(request: Request, named: Sequence[str]) -> list[KnownQueue]:
    """Return the queues that are named, were looked at, or have letters."""
    site = site_of(request)
    looks, seen = site.looks, site.consumers.latest
    counts: Mapping[str, int] = seen.letters if seen else {}
    known = {*named, *looks.latest, *looks.running, *(queue for queue, number in counts.items() if number)}
    return [
        KnownQueue(
            queue, _number(queue, looks.latest.get(queue), seen), looks.latest.get(queue), queue in looks.running
        )
        for queue in sorted(known)
    ]


def _number(queue: str, look: Look | None, seen: SeenConsumers | None) -> int | None:
    """Return how many letters a queue has, as the newer look of both tells; None when neither knows."""
    counted = seen.letters.get(queue) if seen else None
    if look is None or look.error or (seen and counted is not None and seen.at > look.at):
        return counted
    return look.letters
