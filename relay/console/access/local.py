"""Authentication `none`: each user of this host is an owner, under the name of the process's user."""

from starlette.requests import Request

from relay.console.access.identity import Identity, Role
from relay.jobs.job import operator


async def identify_local(_: Request) -> Identity:
    """Return the user of this host."""
    return Identity(operator(), Role.OWNER)
