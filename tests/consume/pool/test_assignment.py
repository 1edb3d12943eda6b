"""Who gets which partition: even, few moves, and never two holders of one epoch, whatever happens in which order."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from relay.consume.pool.assignment import Assigned, changes, released, spread

NAMES = st.sampled_from("abcdefg")
PARTITIONS = 16


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Assigned], set[str]]:
    """Any state that a pool may be found in, and its members."""
    someone = st.none() | NAMES
    count = draw(st.integers(1, PARTITIONS))
    partitions = [Assigned(number, draw(st.integers(0, 9)), draw(someone), draw(someone)) for number in range(count)]
    return partitions, draw(st.sets(NAMES))


@given(pools())
def test_all_are_held_by_members_and_evenly(pool: tuple[list[Assigned], set[str]]) -> None:
    partitions, members = pool
    target = spread(partitions, members)

    assert len(target) == (len(partitions) if members else 0)
    assert set(target.values()) <= members
    counts = [list(target.values()).count(member) for member in members]
    assert not counts or max(counts) - min(counts) <= 1


@given(pools())
def test_no_more_move_than_must(pool: tuple[list[Assigned], set[str]]) -> None:
    """Without promises: those above their share, and those that nobody holds."""
    partitions, members = [Assigned(each.partition, each.epoch, each.member) for each in pool[0]], pool[1]
    target = spread(partitions, members)

    moved = sum(target[each.partition] != each.member for each in partitions) if members else 0
    assert moved == (_fewest(partitions, members) if members else 0)


@given(pools())
def test_it_comes_to_rest(pool: tuple[list[Assigned], set[str]]) -> None:
    """What was decided is not decided otherwise at the next look."""
    partitions, members = pool
    decided = _after(partitions, changes(partitions, members, members))

    assert changes(decided, members, members) == []


def _fewest(partitions: Sequence[Assigned], members: Collection[str]) -> int:
    held = sorted((sum(each.member == member for each in partitions) for member in members), reverse=True)
    least, more = divmod(len(partitions), len(members))
    return len(partitions) - sum(min(count, least + (place < more)) for place, count in enumerate(held))


def _after(partitions: Sequence[Assigned], changed: Sequence[Assigned]) -> list[Assigned]:
    new = {each.partition: each for each in changed}
    return [new.get(each.partition, each) for each in partitions]


class Pool(RuleBasedStateMachine):
    """Members come, go and die; masters look, or have looked before the others have acted; holders release late."""

    present = Bundle("present")

    def __init__(self) -> None:
        super().__init__()
        self.partitions = [Assigned(number) for number in range(PARTITIONS)]
        self.members: set[str] = set()
        self.leaving: set[str] = set()
        self.holders: dict[
            tuple[int, int], str
        ] = {}  # partition and epoch -> the member that was told that it has them
        self.told: dict[int, set[tuple[str, int]]] = {number: set() for number in range(PARTITIONS)}
        self.born = 0

    @initialize(target=present)
    def begin(self) -> Any:
        return self.join()

    @rule(target=present)
    def join(self) -> Any:
        self.born += 1
        name = f"member {self.born}"
        self.members.add(name)
        return name

    @rule(member=present)
    def begin_to_leave(self, member: str) -> None:
        self.leaving.add(member)

    @rule(member=consumes(present))
    def die(self, member: str) -> None:
        """It works no more from here on: a killed process, or a frozen one whose session was ended."""
        self.members.discard(member)
        self.leaving.discard(member)
        for at_work in self.told.values():
            at_work -= {each for each in at_work if each[0] == member}

    @rule()
    def look(self) -> None:
        before = self.partitions
        changed = changes(before, self.members, self.members - self.leaving)
        self.partitions = _after(before, changed)
        for old, new in zip(before, self.partitions, strict=True):
            if new.epoch != old.epoch:
                assert new.epoch == old.epoch + 1
                assert old.member not in self.members, "it was taken from one who lives and has not released it"
                assert new.member is not None
                assert (new.partition, new.epoch) not in self.holders
                self.holders[new.partition, new.epoch] = new.member
                self.told[new.partition].add((new.member, new.epoch))

    @rule(number=st.integers(0, PARTITIONS - 1))
    def release(self, number: int) -> None:
        """The holder sees that another one is wanted, settles and lets go."""
        held = self.partitions[number]
        if held.member is not None and (held.wanted_by is not None or held.member in self.leaving):
            self.told[number].discard((held.member, held.epoch))
            self.partitions[number] = released(held, held.member, held.epoch)

    @rule(number=st.integers(0, PARTITIONS - 1), behind=st.integers(1, 3))
    def release_too_late(self, number: int, behind: int) -> None:
        """One that was removed long ago wakes up and releases what it held then."""
        held = self.partitions[number]
        former = self.holders.get((number, held.epoch - behind))
        if former is not None:
            assert released(held, former, held.epoch - behind) == held

    @rule()
    def settle(self) -> None:
        """When all have done what they see, the partitions are spread evenly over those who serve."""
        for _ in range(3):
            self.look()
            for number in range(PARTITIONS):
                self.release(number)
        self.look()
        serving = self.members - self.leaving
        counts = Counter(each.member for each in self.partitions if each.member is not None)
        assert set(counts) <= serving
        assert sum(counts.values()) == (PARTITIONS if serving else 0)
        numbers = [counts[member] for member in serving]
        assert not numbers or max(numbers) - min(numbers) <= 1

    @invariant()
    def one_at_work(self) -> None:
        """No two members work on one partition at the same time."""
        assert all(len(at_work) <= 1 for at_work in self.told.values())


TestPool = Pool.TestCase
