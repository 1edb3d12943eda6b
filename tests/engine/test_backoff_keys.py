"""Keys whose first row is refused wait for it in the table: they take no room, and their order is kept."""

import pytest

from relay.engine.read.tail import BackingOff
from tests.engine.conftest import Outbox, Reader, RunNode
from tests.engine.follower import IN_ORDER
from tests.engine.rows import ROW
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("refused_by_broker")

LONG = {"backoff_initial": 60.0, "backoff_max": 60.0}
GUILTY, FOLLOWERS = 20, 30


async def insert_guilty(outbox: Outbox) -> dict[int, list[int]]:
    """Write keys of which the first row cannot be sent; give the others by it."""
    heads = [await outbox.insert_faulty(str(key)) for key in range(GUILTY)]
    return {head: [await outbox.insert(str(key)) for _ in range(FOLLOWERS)] for key, head in enumerate(heads)}


async def are_refused(outbox: Outbox, heads: list[int]) -> bool:
    return all([await outbox.column("attempts", head) for head in heads])


async def test_innocent_keys_go_on_beside_more_rows_that_wait_than_the_window_takes(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    guilty = await insert_guilty(outbox)

    async with run_node(max_window_rows=100, **LONG):
        await eventually(lambda: are_refused(outbox, list(guilty)), "each is refused")
        innocent = [await outbox.insert(f"innocent {number}") for number in range(50)]
        assert sorted(await queue.ids(50)) == innocent


async def test_rows_that_waited_for_a_refused_one_follow_it_in_order(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    guilty = await insert_guilty(outbox)

    async with run_node(max_window_rows=100, max_attempts=1000):
        await eventually(lambda: are_refused(outbox, list(guilty)), "each is refused")
        for head in guilty:
            await outbox.mend(head)
        await eventually(outbox.is_empty, "all are sent")

    arrived = await queue.ids(GUILTY * (1 + FOLLOWERS))
    for head, followers in guilty.items():
        key = {head, *followers}
        assert [id_ for id_ in arrived if id_ in key] == [head, *followers]


async def test_a_key_goes_on_when_its_refused_row_is_taken_out_of_the_table(
    outbox: Outbox, queue: Reader, run_node: RunNode
) -> None:
    head = await outbox.insert_faulty("1")
    followers = [await outbox.insert("1") for _ in range(3)]

    async with run_node(backoff_initial=1.0, backoff_max=1.0, max_attempts=1000):
        await eventually(lambda: are_refused(outbox, [head]), "it is refused")
        await outbox.connection.execute("DELETE FROM outbox.message WHERE id = %s", [head])
        assert await queue.ids(3) == followers


async def test_rows_of_another_session_wait_out_their_backoff(outbox: Outbox, queue: Reader, run_node: RunNode) -> None:
    guilty = await insert_guilty(outbox)
    async with run_node(**LONG):
        await eventually(lambda: are_refused(outbox, list(guilty)), "each is refused")

    for head in guilty:
        await outbox.mend(head)
    async with run_node(max_window_rows=100) as node:
        await eventually(node.is_ready, "ready")
        innocent = [await outbox.insert(f"innocent {number}") for number in range(50)]
        assert sorted(await queue.ids(50)) == innocent

    assert await outbox.ids("sent") == innocent


def test_a_row_that_came_to_light_behind_a_later_one_is_read_again_with_it() -> None:
    late, refused = ROW._replace(id=1), ROW._replace(id=5)
    waits = BackingOff(IN_ORDER)

    waits.add(refused, 10.0, [late])

    assert waits.end(10.0) == [(ROW.lane, 1)]


def test_a_row_put_back_is_read_again_though_a_later_one_of_its_key_backs_off() -> None:
    late, refused = ROW._replace(id=1), ROW._replace(id=5)
    waits = BackingOff(IN_ORDER)

    waits.put_back(late, 5.0)
    waits.add(refused, 10.0)

    assert waits.first() == {ROW.lane: 1}
    assert waits.end(5.0) == [(ROW.lane, 1)]
