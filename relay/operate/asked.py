"""What requests are made of: texts and ids that the database can take. Each noun has a file of its requests."""

import base64
import binascii
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema

from relay.engine.session.session import LANES
from relay.errors import UsageError
from relay.jobs.job import BELOW_RATE, LEAST_RATE, Caution

MAX_ID = 2**63 - 1
MOST = 1000  # rows that one request lists or names
QUEUE_NAME = r"^[A-Za-z0-9_.:@#,/+ -]{1,200}$"  # that a request may name

Text = Annotated[str, StringConstraints(pattern=r"^[^\u0000]*$", max_length=1000)]
ShortString = Annotated[str, StringConstraints(pattern=r"^[^\u0000]*$", max_length=255)]
# PostgreSQL takes no NUL in a text. Empty means that nothing was said.
Words = Annotated[str, AfterValidator(lambda text: text.replace("\0", "").strip()), Field(max_length=500)]
Why = Annotated[Text, StringConstraints(strip_whitespace=True, min_length=1)]
Id = Annotated[int, Field(ge=1, le=MAX_ID)]
Lane = Annotated[int, Field(ge=0, lt=LANES)]
# The name of a batch of Spark.
AppId = Annotated[str, StringConstraints(pattern=r"^[^\u0000]+$", max_length=1000)]
Version = Annotated[int, Field(ge=-MAX_ID - 1, le=MAX_ID)]
GroupId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
Group = Annotated[GroupId | None, Field(description="Of this failure group, as `relay failures list` names it.")]
ROW_NAME = r"^[0-9A-Fa-f-]{1,36}$"
# A number too: as the API lists the ids of rows.
RowName = Annotated[
    str,
    BeforeValidator(lambda name: str(name) if type(name) is int else name),
    StringConstraints(pattern=ROW_NAME),
    Field(description="Its id or message id."),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_ID}, {"type": "string", "pattern": ROW_NAME}],
            "description": "Its id or message id.",
        }
    ),
]
RowNames = Annotated[tuple[RowName, ...], Field(max_length=MOST)]
QueueName = Annotated[
    str,
    StringConstraints(pattern=QUEUE_NAME),
    Field(description="The consumed queue, or that of its dead letters."),
]
A_MOMENT = "2026-11-21T08:00:00Z, or so long ago: 2h"
Moment = Annotated[str | None, StringConstraints(pattern=r"^[^\u0000]*$", max_length=50)]
Cursor = Annotated[
    str | None, StringConstraints(max_length=100), Field(description="`next` of an earlier page; else the first page.")
]
Next = Annotated[str | None, Field(description="The cursor of the next page; null on the last one.")]
CURSOR = re.compile(r"([a-z-]+):([0-9]{1,19})")  # the kind of the list, and the id of the last row
Limit = Annotated[int, Field(ge=1, le=MOST)]


class Closed(BaseModel):
    """A part of a request; what it does not know is refused."""

    model_config = ConfigDict(extra="forbid")


class Page(Closed):
    """A page of a list, which has a list of rows, and in `next` the cursor of the next page."""

    @property
    def listed(self) -> list[Any]:
        """The rows, whatever they are called."""
        (rows,) = [value for value in vars(self).values() if isinstance(value, list)]
        return rows

    @property
    def cursor(self) -> str | None:
        """The cursor of the next page."""
        cursor: str | None = vars(self)["next"]
        return cursor

    def add(self, following: "Page") -> None:
        """Be one page with the next one."""
        self.listed.extend(following.listed)
        vars(self)["next"] = following.cursor


def read_cursor(kind: str, cursor: str | None) -> int | None:
    """Return the place that the cursor of such a list names; None for the first page.

    Raises:
        UsageError: it is no cursor of such a list.
    """
    if cursor is None:
        return None
    try:
        found = CURSOR.fullmatch(base64.urlsafe_b64decode(cursor.encode("ascii") + b"==").decode("ascii"))
    except (binascii.Error, UnicodeError, ValueError):
        found = None
    if found is None or found[1] != kind or int(found[2]) > MAX_ID:
        raise UsageError("cursor: it is not `next` of an earlier page of this list")
    return int(found[2])


def next_cursor(kind: str, places: list[int], limit: int) -> str | None:
    """Return the cursor behind the last of these places; None when the page was not full, and so the last."""
    if len(places) < limit:
        return None
    return base64.urlsafe_b64encode(f"{kind}:{places[-1]}".encode()).decode().rstrip("=")


class Nothing(Closed):
    """Nothing is asked that would have to be said."""


class Reasoned(Closed):
    """A change, and why."""

    why: Why


class MaybeReasoned(Closed):
    """A change, and why if that is told."""

    why: Text = ""

    @property
    def reason(self) -> str | None:
        """Return what the audit keeps."""
        return self.why.strip() or None


class MessageFilter(Closed):
    """Which rows or letters, by what their writer said."""

    aggregate_type: Annotated[Text | None, Field(description="Of this type.")] = None
    aggregate_id: Annotated[Text | None, Field(description="Of this key.")] = None
    event_type: Annotated[Text | None, Field(description="Of this event.")] = None


class Many(Closed):
    """What a job changes of all that a filter selects."""

    all: Annotated[bool, Field(description="Every one; needed when there is no filter.")] = False
    limit: Annotated[int | None, Field(ge=1, le=MAX_ID, description="Only the first so many.")] = None


class Paced(Closed):
    """A job, and how fast it goes."""

    rate: Annotated[float | None, Field(ge=LEAST_RATE, lt=BELOW_RATE, description="Rows a second, at most.")] = None

    def caution(self) -> Caution:
        """Return how carefully the job goes on; UsageError when the parts do not fit together."""
        return Caution(rate=self.rate)


class Staged(Paced):
    """A job, and how carefully it goes on."""

    stages: Annotated[tuple[Id, ...], Field(max_length=20, description="Wait for the outcome after so many rows.")] = ()
    stop_when_failing: Annotated[
        float | None, Field(ge=0, le=1, description="Pause when more than this share of a stage fails.")
    ] = None

    def caution(self) -> Caution:
        if list(self.stages) != sorted({*self.stages}):
            raise UsageError("stages: rising numbers, such as [1, 10, 100]")
        if self.stop_when_failing is not None and not self.stages:
            raise UsageError("stop_when_failing needs stages, such as [1, 10, 100]")
        return Caution(rate=self.rate, stages=self.stages, stop_when_failing=self.stop_when_failing)


def check_choice(*, is_filtered: bool, is_all: bool) -> None:
    """See that a request says which rows it means: by ids and filters, or all.

    Raises:
        UsageError: it says neither, or both.
    """
    if is_filtered == is_all:
        raise UsageError('give ids or a filter, or "all": true for every row; not both')
