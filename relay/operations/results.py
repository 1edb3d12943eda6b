"""What the operations return that no other module has a name for; the field names are the keys of the JSON."""

from dataclasses import dataclass
from datetime import datetime

from relay.jobs.job import Job, JobFailure
from relay.operate.failures import Group
from relay.operate.letters.letter import Letter
from relay.operate.letters.read import Read
from relay.operate.parked.read import Parked
from relay.operate.routes.quarantine import RouteStatus, WaitingRow
from relay.operate.sent.selection import Day


@dataclass(frozen=True, slots=True)
class ParkedRows:
    """Some of the parked rows that were selected, by id, and how many there are in all."""

    rows: list[Parked]
    total: int


@dataclass(frozen=True, slots=True)
class ShownRoute:
    """A route in quarantine with some of its rows, by id."""

    route: RouteStatus
    rows: list[WaitingRow]


@dataclass(frozen=True, slots=True)
class RoutePreview:
    """What a reroute or discard would change."""

    route: RouteStatus
    rows: int
    oldest: datetime | None  # when the first of them was written
    first: list[WaitingRow]


@dataclass(frozen=True, slots=True)
class Failures:
    """Groups of failures, and letters that a delivery limit of their queue may drop."""

    groups: list[Group]  # the largest first, as many as were asked for
    total: int  # groups in all
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Ordered:
    """A job that a console runs, and what was named for it and is not there, with the reason."""

    job: Job
    not_found: list[str]


@dataclass(frozen=True, slots=True)
class ShownJob:
    """A job with some of the rows that failed in it, by id."""

    job: Job
    failures: list[JobFailure]


@dataclass(frozen=True, slots=True)
class ReplayPreview:
    """What a replay would send."""

    rows: int
    days: list[Day]
    left_out: list[str]  # which rows match and are not sent, in words


@dataclass(frozen=True, slots=True)
class SeenLetters:
    """What is known of letters that may be thrown away."""

    read: Read
    oldest: datetime | None  # the last failure of that letter which failed first
    first: list[Letter]


@dataclass(frozen=True, slots=True)
class ListedLetters:
    """Dead letters of a queue, and how far it was read."""

    queue: str
    letters: list[Letter]
    read: Read
