"""Roles, and who has which: a route names the least role that may use it.

@router.post("/parked/{row}/retry")
def retry(row: int, who: Annotated[Identity, Depends(require(Role.OPERATOR))]) -> Response: ...
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from starlette.requests import Request

from relay.config.settings import ConsoleSettings
from relay.errors import OutboxError
from relay.operate.operation import Role


@dataclass(frozen=True, slots=True)
class Identity:
    """A user, as the audit names them."""

    name: str
    role: Role

    def require(self, role: Role) -> None:
        """Raises RefusedError: the user's role does not include this one."""
        if not self.role.includes(role):
            words = f"{self.name} is {self.role}, and this takes the role {role}"
            raise RefusedError(HTTPStatus.FORBIDDEN, words)


class Identifier(Protocol):
    """Finds out who sends a request: by a session, a token, or a proxy's headers."""

    def __call__(self, request: Request, /) -> Awaitable[Identity | None]:
        """Return who it is; None for a request of nobody that we know."""


class Door(Protocol):
    """What a request meets before it is known who sends it: `relay.console.access.access.Access`."""

    console: ConsoleSettings
    identify: Identifier


def door_of(request: Request) -> Door:
    """Return the door of the console that got the request."""
    door: Door = request.app.state.site.access
    return door


class RefusedError(OutboxError):
    """A request that this user may not make, or not now; nothing was done."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


class LoginNeededError(RefusedError):
    """A request of nobody that we know."""

    def __init__(self) -> None:
        super().__init__(HTTPStatus.UNAUTHORIZED, "log in first")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A dependency of a route: returns who asks, if their role includes this one.

    Raises:
        LoginNeededError: the request is of nobody that we know.
        RefusedError: the role does not include this one.
    """

    role: Role

    async def __call__(self, request: Request) -> Identity:
        identity = await door_of(request).identify(request)
        if identity is None:
            raise LoginNeededError
        identity.require(self.role)
        request.state.identity = identity
        return identity


def require(role: Role) -> Requirement:
    """Return the dependency of a route that users of this role, and of those above it, may use."""
    return Requirement(role)
