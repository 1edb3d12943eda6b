"""Letters are sent back in stages, and a job pauses when too many of them fail again."""

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.jobs.job import Caution, Job, read_job, resume_job
from relay.operate.dead_letters import stages
from relay.operate.dead_letters.change import Command, Done
from relay.operate.dead_letters.job import order_letters, run_letters
from relay.operate.dead_letters.letter import Selection
from relay.operate.session import session
from tests.dead_letters.changes import RETRY, Audit
from tests.dead_letters.letters import Letters
from tests.dead_letters.tried import LATER, consuming
from tests.support.eventually import eventually

EVERYTHING = Selection()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "MARGIN", 0.5)
    monkeypatch.setattr(stages, "LOOK_INTERVAL", 0.05)


async def retried(connection: psycopg.Connection, letters: Letters, caution: Caution) -> tuple[Done, Job]:
    job = order_letters(connection, "outbox", RETRY, EVERYTHING, caution=caution)
    done = await run_letters(connection, "outbox", letters.broker, job)
    return done, read_job(connection, "outbox", job.id)


async def resumed(connection: psycopg.Connection, letters: Letters, job: Job) -> Job:
    job = resume_job(connection, "outbox", job.id, by="ann")
    await run_letters(connection, "outbox", letters.broker, job)
    return read_job(connection, "outbox", job.id)


async def test_stages_that_are_applied_are_passed(letters: Letters, database: DatabaseSettings, audit: Audit) -> None:
    sent = await letters.put_all(50)
    caution = Caution(stages=(1, 10), stop_when_failing=0)

    async with consuming(letters, audit) as tried:
        with session(database) as connection:
            done, job = await retried(connection, letters, caution)
        await eventually(lambda: len(tried.ids) == len(sent), "all are consumed")

    assert (done.done, done.failed_again, job.state, job.stage, job.failed) == (50, 0, "done", 2, 0)
    assert tried.ids == sent
    assert all(stage >= sum(count >= each for each in caution.stages) for count, stage in tried.stages)


async def test_a_stage_that_fails_pauses_the_job_which_goes_on_without_what_came_back(
    letters: Letters, database: DatabaseSettings, audit: Audit
) -> None:
    sent = await letters.put_all(6)

    async with consuming(letters, audit, fails=lambda id_: id_ == "id-0") as tried:
        with session(database) as connection:
            done, paused = await retried(connection, letters, Caution(stages=(2, 4), stop_when_failing=0.4))
            left = await letters.ids()
            job = await resumed(connection, letters, paused)
        await eventually(lambda: len(tried.ids) == len(sent), "all are consumed")

    assert (done.done, done.failed_again) == (2, 1)
    assert (paused.state, paused.stage, paused.done, paused.failed) == ("paused", 1, 2, 1)
    assert paused.paused_because == ("letters that failed while a stage of 2 was tried: 1, or 50%, and at most 40% may")
    assert left == ["id-2", "id-3", "id-4", "id-5", "id-0"]
    assert (job.state, job.done, job.failed, job.selected) == ("done", 6, 1, 6)
    assert tried.ids == sent
    assert await letters.ids() == ["id-0"]


async def test_a_stage_waits_as_long_as_the_tries_of_a_letter_took_the_last_time(
    letters: Letters, database: DatabaseSettings, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test does not wait for all of that minute: the letter comes back."""
    monkeypatch.setattr(stages, "MARGIN", 0)
    await letters.put(message_id="late", failed_at=LATER)
    await letters.put(message_id="other")
    left = list[str | None]()

    def is_seen_first(id_: str | None) -> bool:
        left.append(id_)
        return True

    async with consuming(letters, audit, fails=is_seen_first, after=1):
        with session(database) as connection:
            _, job = await retried(connection, letters, Caution(stages=(1,), stop_when_failing=0))

    assert (job.state, job.done, left) == ("paused", 1, ["late"])


async def test_a_stage_that_nobody_consumes_pauses_the_job(
    letters: Letters, database: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "LONGEST", 0.5)
    await letters.put_all(3)

    with session(database) as connection:
        _, job = await retried(connection, letters, Caution(stages=(1,)))

    assert (job.state, job.stage, job.done) == ("paused", 1, 1)
    assert job.paused_because == f"letters still wait in {letters.queue.name}: see to its consumers"
    assert await letters.waiting() == 2


async def test_letters_that_are_refused_are_failures_of_their_stage(
    letters: Letters, database: DatabaseSettings
) -> None:
    await letters.channel.queue_delete(letters.queue.name)
    await letters.queue.declare("classic", **{"x-max-length": 0, "x-overflow": "reject-publish"})
    await letters.put_all(3)

    with session(database) as connection:
        done, job = await retried(connection, letters, Caution(stages=(2,), stop_when_failing=0))

    assert (job.state, job.stage, job.done, len(done.refused)) == ("paused", 1, 0, 2)
    assert await letters.waiting() == 3


async def test_a_job_that_is_stopped_in_a_stage_sends_each_letter_once(
    letters: Letters, database: DatabaseSettings, audit: Audit
) -> None:
    sent = await letters.put_all(5)

    async def run_and_stop(command: Command) -> Done:
        running.append(command)
        return await command.run()

    def fails(_: str | None) -> bool:
        running[0].stop()  # its first stage waits
        return False

    running: list[Command] = []
    async with consuming(letters, audit, fails=fails) as tried:
        with session(database) as connection:
            job = order_letters(connection, "outbox", RETRY, EVERYTHING, caution=Caution(stages=(1, 3)))
            await run_letters(connection, "outbox", letters.broker, job, run=run_and_stop)
            stopped = read_job(connection, "outbox", job.id)
            ended = await resumed(connection, letters, job)
        await eventually(lambda: len(tried.ids) == len(sent), "all are consumed")

    assert (stopped.state, stopped.stage, stopped.done) == ("interrupted", 0, 1)
    assert (ended.state, ended.stage, ended.done, ended.failed) == ("done", 2, 5, 0)
    assert tried.ids == sent
