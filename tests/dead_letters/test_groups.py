"""Dead letters are grouped by their cause, and a group chooses letters."""

from relay.config.settings import DatabaseSettings
from relay.jobs.job import read_job
from relay.operate.failures import group_letters, with_retries
from relay.operate.letters.letter import LetterSelection
from relay.operate.letters.read import list_letters
from relay.operate.letters.work import order_letters
from relay.operate.session import session
from tests.dead_letters.changes import RETRY, run_letters
from tests.dead_letters.letters import DEAD, NO_FILTER, Letters


async def test_letters_of_one_exception_and_type_are_one_group(letters: Letters) -> None:
    for number in range(3):
        await letters.put(number, key=str(number))
    await letters.put(event_type="Paid")
    await letters.put(exception="ValueError")

    found, _ = await list_letters(letters.broker, DEAD, NO_FILTER)
    groups = group_letters(found, DEAD)

    first = groups[0]
    assert (first.cause, first.event_type, first.place) == ("RuntimeError: not today", "Counted", DEAD)
    assert first.count == 3
    assert sorted(each.count for each in groups) == [1, 1, 3]
    assert len({each.id for each in groups}) == 3


async def test_a_group_chooses_its_letters_and_knows_its_retries(letters: Letters, database: DatabaseSettings) -> None:
    chosen = [await letters.put(number) for number in range(2)]
    other = await letters.put(exception="ValueError")
    found, _ = await list_letters(letters.broker, DEAD, NO_FILTER)
    group = group_letters(found, DEAD)[0]

    with session(database) as tables:
        job = order_letters(tables, RETRY, LetterSelection(group=group.id))
        done = await run_letters(database, letters.broker, job)
        (again,) = with_retries(tables, [group])
        after = read_job(tables, job.id)

    left, _ = await list_letters(letters.broker, DEAD, NO_FILTER)
    assert done.done == len(chosen) == again.retried == after.done
    assert after.state == "done"
    assert [each.message_id for each in left] == [other]


def test_a_selection_is_written_down_and_read_again() -> None:
    selection = LetterSelection(message_ids=frozenset({"a", "b"}), group="g", limit=3, reason="exhausted")

    assert LetterSelection.from_json(selection.as_json()) == selection
