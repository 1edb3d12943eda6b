"""The groups of failures are those of now, or of the last count where a count takes long."""

import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from relay.console import failure_groups
from relay.console.failure_groups import FailureGroups
from relay.errors import DeadlineError
from relay.operate.failures import Group, Where
from tests.support.eventually import eventually


def group(count: int) -> Group:
    return Group(
        id="3f2a9c01be77",
        source=Where.PARKED,
        cause="too large",
        event_type="Paid",
        place="",
        count=count,
        first_at=None,
        last_at=None,
        keys_held=0,
        rows_held=0,
        retried=0,
    )


class Table:
    """Has so many failures; a count waits for `open`."""

    def __init__(self) -> None:
        self.failures = 1
        self.counts = 0
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def read(self) -> Sequence[Group]:
        self.counts += 1
        assert self.open.wait(30)
        if self.error:
            raise self.error
        return [group(self.failures)]


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
async def groups(table: Table) -> AsyncIterator[FailureGroups]:
    counted = FailureGroups(table.read)
    yield counted
    table.open.set()
    await counted.close()


async def count(groups: FailureGroups) -> int:
    return (await groups.counted()).groups[0].count


async def test_what_is_counted_soon_is_of_now(table: Table, groups: FailureGroups) -> None:
    first = await count(groups)
    table.failures = 2

    assert (first, await count(groups)) == (1, 2)


async def test_the_last_count_has_to_do_while_the_next_takes_long(
    table: Table, groups: FailureGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_groups, "PATIENCE", 0.05)
    await count(groups)
    table.failures = 2
    table.open.clear()

    meanwhile = [await count(groups) for _ in range(3)]
    counts = table.counts
    table.open.set()

    assert (meanwhile, counts) == ([1, 1, 1], 2)

    async def is_counted() -> bool:
        return await count(groups) == 2

    await eventually(is_counted, "the count has ended")


async def test_a_count_that_fails_is_told_and_the_next_may_go_well(table: Table, groups: FailureGroups) -> None:
    table.error = DeadlineError("it took too long", seconds=2)

    with pytest.raises(DeadlineError):
        await groups.counted()
    table.error = None

    assert await count(groups) == 1
