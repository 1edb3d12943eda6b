"""What `ordering` and `key_policy` mean together: what a row waits for.

docs/decisions/0029-one-delivery-policy.md says why each combination does what it does.
"""

from dataclasses import dataclass
from typing import Self

from relay.config.settings import KeyPolicy, Ordering


@dataclass(frozen=True, slots=True)
class DeliveryPolicy:
    """What the rows of one key have to wait for."""

    one_at_a_time: bool  # nothing of a key is sent before its predecessor is settled
    backoff_holds_key: bool  # later rows wait for a row that is tried again later, and come back behind it
    put_away_holds_key: bool  # later rows wait for a row that is parked or in quarantine, in the same place

    @classmethod
    def of(cls, ordering: Ordering, key_policy: KeyPolicy) -> Self:
        """Return the policy that these settings ask for."""
        holds = key_policy is KeyPolicy.HOLD
        return cls(
            one_at_a_time=ordering is Ordering.KEY,
            # When later rows are already in flight, keeping back the rest would not restore the order.
            backoff_holds_key=holds and ordering is Ordering.KEY,
            put_away_holds_key=holds,
        )
