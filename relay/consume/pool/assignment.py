"""Which member works on which partition: pure code, that knows neither database nor clock.

A partition has one holder at most, and each holder it gets raises its epoch. Another member gets it only after the
holder has released it, or is gone. Until then `wanted_by` names that member. The holder sees that, settles what it has
in hand and releases the partition.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Assigned:
    """A partition, and who holds it."""

    partition: int
    epoch: int = 0  # of the holder that it has, or had last
    member: str | None = None
    wanted_by: str | None = None  # who gets it once its holder has released it


def spread(partitions: Sequence[Assigned], members: Collection[str]) -> dict[int, str]:
    """Return the member that must hold each partition: all are held, by numbers that differ by one at most, and the
    fewest move.

    Nobody holds any when there are no members.
    """
    if not members:
        return {}
    homes = {member: [each for each in partitions if _home(each, members) == member] for member in members}
    # Who has most keeps one more than the others, where not all can have as many.
    order = sorted(members, key=lambda member: (-len(homes[member]), member))
    least, more = divmod(len(partitions), len(order))
    target: dict[int, str] = {}
    missing: Counter[str] = Counter()
    for place, member in enumerate(order):
        share = least + (place < more)
        # Of those it has too many of, it keeps what it holds already.
        kept = sorted(homes[member], key=lambda each: (each.member != member, each.partition))[:share]
        target |= {each.partition: member for each in kept}
        missing[member] = share - len(kept)
    homeless = [each for each in partitions if each.partition not in target]
    for each in sorted(homeless, key=lambda each: each.member is None):  # one that has a holder may stay with it
        member = each.member if each.member and missing[each.member] > 0 else max(order, key=missing.__getitem__)
        missing[member] -= 1
        target[each.partition] = member
    return target


def changes(partitions: Sequence[Assigned], members: Collection[str], serving: Collection[str]) -> list[Assigned]:
    """Return the partitions that change, in their new state.

    Args:
        members: who is there; what anybody else holds is free.
        serving: those of them that are to hold partitions; the others hold theirs until they have released them.
    """
    target = spread(partitions, serving)
    return [new for old in partitions if (new := _changed(old, target.get(old.partition), members)) != old]


def released(assigned: Assigned, member: str, epoch: int) -> Assigned:
    """Return a partition after its holder has let it go; one that is not its holder any more changes nothing."""
    if (assigned.member, assigned.epoch) != (member, epoch):
        return assigned
    return replace(assigned, member=None)


def _changed(old: Assigned, target: str | None, members: Collection[str]) -> Assigned:
    if old.member is not None and old.member in members:
        return replace(old, wanted_by=None if target == old.member else target)
    if target is None:
        return replace(old, member=None, wanted_by=None)
    return Assigned(old.partition, old.epoch + 1, target)


def _home(assigned: Assigned, members: Collection[str]) -> str | None:
    """Return where a partition belongs by now: a promise counts, so that no promise is taken back at the next look."""
    return next((member for member in (assigned.wanted_by, assigned.member) if member in members), None)
