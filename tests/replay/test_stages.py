"""A replay in stages pauses when too many rows of a stage are refused, and an operator pauses one that runs."""

from tests.replay.conftest import Commands
from tests.replay.sent import Copies, SentRows, faults

TOO_LONG = "x" * 250  # a routing key may not be so long
STAGES = ("--stages", "4,20,all", "--stop-when-failing", "10%")


async def test_a_stage_that_is_refused_too_often_pauses_the_replay(
    relay: Commands, sent: SentRows, copies: Copies
) -> None:
    await sent.add(2, event_type=TOO_LONG)
    ids = await sent.add(50)

    paused = await relay("replay", "--all", *STAGES)
    (job,) = await relay.jobs()
    resumed = await relay("jobs", "resume", "1")
    (after,) = await relay.jobs()

    assert (paused.code, resumed.code) == (3, 1), paused.said
    assert "replay 1 is paused after 4 of 52 rows" in paused.said
    assert (job["state"], job["stage"], job["done"], job["failed"]) == ("paused", 1, 2, 2)
    assert job["paused_because"] == "2 of 4 rows of the stage failed, and at most 10% may"
    assert (after["state"], after["stage"], after["done"], after["failed"]) == ("done", 2, 50, 2)
    assert faults(ids, await copies.read()) == []


async def test_stages_without_refusals_are_passed(relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(10)

    ended = await relay("replay", "--all", *STAGES)

    (job,) = await relay.jobs()
    assert ended.code == 0, ended.said
    assert (job["state"], job["stage"], job["done"], job["failed"]) == ("done", 2, 10, 0)
    assert faults(ids, await copies.read()) == []


async def test_a_replay_that_runs_is_paused_and_goes_on(relay: Commands, sent: SentRows, copies: Copies) -> None:
    ids = await sent.add(2000)
    replaying = relay.start("replay", "--all", "--rate", "50")
    await copies.has(20)

    paused = await relay.ask("jobs", "pause", "1", "--by", "ada", "--why", "lunch")
    ended = await relay.end(replaying)
    (job,) = await relay.jobs()
    resumed = await relay("jobs", "resume", "1", "--rate", "100000")

    assert (paused.code, ended.code, resumed.code) == (0, 3, 0), resumed.said
    assert "replay 1 is paused after" in ended.said
    assert (job["state"], job["paused_because"], job["rate"]) == ("paused", "paused by ada: lunch", 50.0)
    assert faults(ids, await copies.read()) == []
