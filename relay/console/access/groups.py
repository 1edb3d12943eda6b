"""From the groups that a proxy or a provider tells to a role."""

from collections.abc import Iterable

from relay.config.settings import ConsoleSettings
from relay.operate.operation import Role


def names(text: str) -> list[str]:
    """Return the names of a list with commas between."""
    return [name for name in map(str.strip, text.split(",")) if name]


def role_of(groups: Iterable[str], console: ConsoleSettings) -> Role | None:
    """Return the highest role that one of the groups has; None when no group has a role."""
    given = set(groups)
    wanted = (
        (Role.OWNER, console.owner_groups),
        (Role.OPERATOR, console.operator_groups),
        (Role.VIEWER, console.viewer_groups),
    )
    return next((role for role, listed in wanted if given.intersection(names(listed))), None)
