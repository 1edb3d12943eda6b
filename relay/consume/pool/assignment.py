"""Which member works on which partition: pure code that knows neither database nor clock.

A partition has one holder at most, and each new holder raises its epoch. Another member gets the partition only after
the holder has released it, or is gone. Until then `wanted_by` names that member. The holder sees this, settles its
messages in flight, and releases the partition.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Assigned:
    """A partition and its holder."""

    partition: int
    epoch: int = 0  # of its holder, or of the last one
    member: str | None = None
    wanted_by: str | None = None  # the member that gets it once its holder has released it


def spread(partitions: Sequence[Assigned], members: Collection[str]) -> dict[int, str]:
    """Return the member that must hold each partition; empty without members.

    Every partition gets a holder. The numbers of partitions differ by one at most between members, and as few
    partitions as possible move.
    """
    if not members:
        return {}
    homes = {member: [each for each in partitions if _home(each, members) == member] for member in members}
    # If the shares differ, the members that have most get one more than the others.
    order = sorted(members, key=lambda member: (-len(homes[member]), member))
    least, more = divmod(len(partitions), len(order))
    target: dict[int, str] = {}
    missing: Counter[str] = Counter()
    for place, member in enumerate(order):
        share = least + (place < more)
        # A member with too many keeps the partitions that it already holds.
        kept = sorted(homes[member], key=lambda each: (each.member != member, each.partition))[:share]
        target |= {each.partition: member for each in kept}
        missing[member] = share - len(kept)
    homeless = [each for each in partitions if each.partition not in target]
    for each in sorted(homeless, key=lambda each: each.member is None):  # first those that may stay with their holder
        member = each.member if each.member and missing[each.member] > 0 else max(order, key=missing.__getitem__)
        missing[member] -= 1
        target[each.partition] = member
    return target


def changes(partitions: Sequence[Assigned], members: Collection[str], serving: Collection[str]) -> list[Assigned]:
    """Return the partitions that change, in their new state.

    Args:
        members: the members that are alive. A partition whose holder is not among them is free.
        serving: the members that get partitions. The others keep theirs until they have released them.
    """
    target = spread(partitions, serving)
    return [new for old in partitions if (new := _changed(old, target.get(old.partition), members)) != old]


def released(assigned: Assigned, member: str, epoch: int) -> Assigned:
    """Return a partition after its holder has released it; unchanged when the member no longer holds it."""
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
    """Return the member to which a partition belongs.

    `wanted_by` counts before the holder, so that the next look does not take a promise back.
    """
    return next((member for member in (assigned.wanted_by, assigned.member) if member in members), None)
