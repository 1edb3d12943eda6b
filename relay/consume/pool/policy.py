"""How a consumer takes part in a pool: the settings that an application gives a member."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from relay.consume.apply.handlers import require_callable
from relay.errors import ConfigurationError

LEAST_TIMEOUT, MOST_TIMEOUT = 0.01, 86_400.0  # seconds; the limits of the table's column


@dataclass(slots=True)
class Partition:
    """A partition, as `on_assigned` and `on_revoked` get it.

    Attributes:
        number: from 0 to 15.
        epoch: one more for each holder; messages carry it in the header `x-partition-epoch`.
        is_lost: another member may already have the partition. State that is saved now may be older than that member's.
    """

    number: int
    epoch: int
    is_lost: bool = False


Hook = Callable[[Partition], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """How a consumer takes part in a pool.

    Args:
        on_assigned: called before the first message of a partition, until it succeeds, to load state. It is called
            again after a transaction that failed or whose outcome is unknown: its handlers may have changed the state.
            With this hook, a partition has one transaction at a time.
        on_revoked: called after the last message, to save state. A member that dies does not call it. A member that was
            taken for dead (`Partition.is_lost`) calls it too late. So handlers must write in their transaction whatever
            must not be lost.
        member: the name, unique in the pool; None: made of host, process and a random part.
        check_in_timeout: seconds without a check-in after which a member is taken for dead; at most a day.
    Raises:
        ConfigurationError: `check_in_timeout` is below 0.01 or above a day, or a hook takes no partition.
    """

    on_assigned: Hook | None = None
    on_revoked: Hook | None = None
    member: str | None = None
    check_in_timeout: float = 0.8

    def __post_init__(self) -> None:
        if not LEAST_TIMEOUT <= self.check_in_timeout <= MOST_TIMEOUT:
            raise ConfigurationError(
                f"check_in_timeout ({self.check_in_timeout}) is from {LEAST_TIMEOUT} to {MOST_TIMEOUT} seconds"
            )
        for hook in filter(None, (self.on_assigned, self.on_revoked)):
            require_callable(hook, "hook", {"partition": "the partition"})
