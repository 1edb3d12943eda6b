"""An operation is a value: what it asks and gives, what does it, who may, and how the HTTP API calls it.

Each noun declares its operations next to their requests; relay/operate/operations.py lists them all. The commands, the
HTTP API, its client and the console's pages read them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel

from relay.config.settings import Settings
from relay.servers.postgres.tables import Tables

Asked = TypeVar("Asked", bound=BaseModel)
Given = TypeVar("Given")

BULK_TIMEOUT = 600.0  # seconds for a statement: one head may have a million rows behind it
SCAN_TIMEOUT = 3600.0  # seconds for a statement: days of sent rows are read from end to end

Connect = Callable[[float | None], AbstractContextManager[Tables]]


class Role(StrEnum):
    """What a user may do; each role may do what the ones before it may."""

    VIEWER = "viewer"  # see figures, states and errors, but not what messages say
    OPERATOR = "operator"  # reveal what messages say; retry, reroute, pause and resume
    OWNER = "owner"  # discard and drop

    def includes(self, other: "Role") -> bool:
        """Whether this role may do what the other may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class Effect(Enum):
    """What an operation changes, which decides how a repeated request is answered."""

    NOTHING = auto()  # it reads, though it may note in the audit who has read
    STORED = auto()  # the database alone: the change commits together with its answer
    ELSEWHERE = auto()  # it commits by itself: it is noted before it begins
    ORDERED = auto()  # as STORED, and what changed is a job that waits for one who runs it
    RESUMED = auto()  # as ORDERED, of a job that was there


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of the settings, on which an operation is done, and for whom.

    Args:
        connect: yields the tables in a session, whose statements may take so many seconds; `None`: as the settings say.
        file: the relay.toml that was read, for the doctor.
        by: whom the audit names.
        by_console: a console runs the jobs that are ordered.
        require: raises when the one who asks may not do what takes this role.
    """

    settings: Settings
    connect: Connect
    file: Path | None = None
    by: str = ""
    by_console: bool = False
    require: Callable[[Role], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Operation(Generic[Asked, Given]):
    """What an operator can do.

    Attributes:
        name: as in `lanes.pause`: noun and verb of the command, of which the API makes its operation id.
        path: of the API; what it has in braces is a field of `asks`.
        role: the least role that may do it.
        is_alone: it opens connections beyond the console's pool, and so only one is done at a time.
    """

    name: str
    asks: type[Asked]
    gives: Any  # the type `Given`, for what it is read by and written by
    does: Callable[[Servers, Asked], Given]
    method: str
    path: str
    role: Role
    effect: Effect
    is_alone: bool

    @property
    def id(self) -> str:
        """The operation id of the API."""
        return self.name.replace(".", "_").replace("-", "_")


def operation(
    name: str, request: str, role: Role, effect: Effect = Effect.NOTHING, *, is_alone: bool = False
) -> Callable[[Callable[[Servers, Asked], Given]], Operation[Asked, Given]]:
    """Make an operation of a function: its types are what is asked and given, and its docstring is what it does.

    Args:
        request: method and path, as in `POST /lanes/{lane}/pause`.
    """

    def declare(does: Callable[[Servers, Asked], Given]) -> Operation[Asked, Given]:
        _, asks, gives = get_type_hints(does, include_extras=True).values()
        method, path = request.split()
        return Operation(name, asks, gives, does, method, path, role, effect, is_alone)

    return declare
