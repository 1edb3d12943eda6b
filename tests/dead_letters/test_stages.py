"""Letters are sent back in stages, and a job pauses when too many of them fail again."""

from datetime import timedelta

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings
from relay.jobs.job import Caution, Job, read_job, resume_job
from relay.jobs.runner import Run
from relay.operate.letters import trial
from relay.operate.letters.letter import LetterSelection
from relay.operate.letters.work import LettersDone, order_letters
from relay.operate.session import session
from relay.servers.postgres.tables import Tables
from tests.dead_letters.changes import RETRY, Audit, run_letters
from tests.dead_letters.letters import DEAD, FAILED_AT, Letters
from tests.dead_letters.tried import consuming
from tests.support.bulk import settings_of
from tests.support.eventually import eventually

EVERYTHING = LetterSelection()


class Stopped:
    """A run that is stopped when the consumer has a letter of the first stage."""

    def __init__(self) -> None:
        self._run: Run | None = None

    def begun(self, run: Run) -> None:
        self._run = run

    async def stop(self) -> None:
        if self._run is not None:
            self._run.stop()


@pytest.fixture
def stopped() -> Stopped:
    return Stopped()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MARGIN", 0.5)
    monkeypatch.setattr(trial, "LOOK_INTERVAL", 0.05)


async def retried(connection: psycopg.Connection, letters: Letters, caution: Caution) -> tuple[LettersDone, Job]:
    job = order_letters(Tables(connection, "outbox"), RETRY, EVERYTHING, caution=caution)
    done = await run_letters(settings_of(connection).database, letters.broker, job)
    return done, read_job(Tables(connection, "outbox"), job.id)


async def resumed(connection: psycopg.Connection, letters: Letters, job: Job) -> Job:
    job = resume_job(Tables(connection, "outbox"), job.id, by="ann")
    await run_letters(settings_of(connection).database, letters.broker, job)
    return read_job(Tables(connection, "outbox"), job.id)


async def test_stages_that_are_applied_are_passed(letters: Letters, database: DatabaseSettings, audit: Audit) -> None:
    sent = await letters.put_all(50)
    caution = Caution(stages=(1, 10), stop_when_failing=0)

    async with consuming(letters, audit) as tried:
        with session(database) as tables:
            done, job = await retried(tables.connection, letters, caution)
        await eventually(lambda: len(tried.ids) == len(sent), "all are consumed")

    assert (done.done, done.failed_again, job.state, job.stage, job.failed) == (50, 0, "done", 2, 0)
    assert tried.ids == sent
    assert all(stage >= sum(count >= each for each in caution.stages) for count, stage in tried.stages)


async def test_a_stage_that_fails_pauses_the_job_which_goes_on_without_what_came_back(
    letters: Letters, database: DatabaseSettings, audit: Audit
) -> None:
    sent = await letters.put_all(6)

    async with consuming(letters, audit, fails=lambda id_: id_ == "id-0") as tried:
        with session(database) as tables:
            done, paused = await retried(tables.connection, letters, Caution(stages=(2, 4), stop_when_failing=0.4))
            await eventually(lambda: letters.has(5), "the others are back")
            left = await letters.ids()
            await eventually(lambda: letters.has(5), "they are back again")
            job = await resumed(tables.connection, letters, paused)
        await eventually(lambda: len(tried.ids) == len(sent), "all are consumed")

    assert (done.done, done.failed_again) == (2, 1)
    assert (paused.state, paused.stage, paused.done, paused.failed) == ("paused", 1, 2, 1)
    assert paused.paused_because == ("letters that failed while a stage of 2 was tried: 1, or 50%, and at most 40% may")
    assert left == ["id-2", "id-3", "id-4", "id-5", "id-0"]
    assert (job.state, job.done, job.failed, job.selected) == ("done", 6, 1, 6)
    assert tried.ids == sent
    assert await letters.ids() == ["id-0"]


async def test_a_stage_waits_longer_than_the_tries_of_a_keys_letters_took_the_last_time(
    letters: Letters, database: DatabaseSettings, audit: Audit
) -> None:
    """Five letters of one key may be tried one after the other; the test waits until the first has failed."""
    for number in range(5):
        await letters.put(number, failed_at=FAILED_AT + timedelta(seconds=2))

    async with consuming(letters, audit, fails=lambda _: True, after=6):
        with session(database) as tables:
            _, job = await retried(tables.connection, letters, Caution(stages=(5,), stop_when_failing=0))

    assert (job.state, job.done) == ("paused", 5)
    assert job.failed >= 1


async def test_a_stage_that_nobody_consumes_pauses_the_job_which_stays_in_it(
    letters: Letters, database: DatabaseSettings, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LONGEST", 3)
    await letters.put_all(3)

    with session(database) as tables, capture_logs() as events:
        _, job = await retried(tables.connection, letters, Caution(stages=(1,)))
        await eventually(lambda: letters.has(2), "the others are back")
        warned = [event["queue"] for event in events if event["event"] == "dead_letters.unconsumed"]
        async with consuming(letters, audit) as tried:
            ended = await resumed(tables.connection, letters, job)
            await eventually(lambda: len(tried.ids) == 3, "all are consumed")

    assert warned == [letters.queue.name]
    assert (job.state, job.stage, job.done) == ("paused", 0, 1)
    assert job.paused_because == f"{letters.queue.name} was never empty in 3 s: see to its consumers"
    assert tried.stages == [(0, 0), (1, 1), (2, 1)]
    assert (ended.state, ended.done) == ("done", 3)


async def test_a_stage_cannot_count_while_others_take_letters(
    letters: Letters, database: DatabaseSettings, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LONGEST", 3)
    await letters.put_all(40)  # more than the job has in its hands

    async def takes_one() -> None:
        await letters.channel.basic_get(DEAD, no_ack=True)

    async with consuming(letters, audit, does=takes_one):
        with session(database) as tables:
            _, job = await retried(tables.connection, letters, Caution(stages=(1,)))

    assert (job.state, job.stage, job.done) == ("paused", 0, 1)
    assert job.paused_because == f"others took letters out of {DEAD}: a stage cannot count in it"


async def test_letters_that_are_refused_are_failures_of_their_stage(
    letters: Letters, database: DatabaseSettings
) -> None:
    await letters.channel.queue_delete(letters.queue.name)
    await letters.queue.declare("classic", **{"x-max-length": 0, "x-overflow": "reject-publish"})
    await letters.put_all(3)

    with session(database) as tables:
        done, job = await retried(tables.connection, letters, Caution(stages=(2,), stop_when_failing=0))

    assert (job.state, job.stage, job.done, len(done.refused)) == ("paused", 1, 0, 2)
    assert await letters.waiting() == 3


async def test_a_job_that_is_stopped_in_a_stage_sends_each_letter_once(
    letters: Letters, database: DatabaseSettings, audit: Audit, stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LONGEST", 3)
    sent = await letters.put_all(5)

    async with consuming(letters, audit, does=stopped.stop) as tried:
        with session(database) as tables:
            chosen = LetterSelection(message_ids=frozenset(sent))
            job = order_letters(tables, RETRY, chosen, caution=Caution(stages=(1, 3)))
            await run_letters(settings_of(tables.connection).database, letters.broker, job, begun=stopped.begun)
            first = read_job(tables, job.id)
            await eventually(lambda: letters.has(4), "the others are back")
            done = await run_letters(settings_of(tables.connection).database, letters.broker, first)
            ended = read_job(tables, job.id)
        await eventually(lambda: len(tried.ids) == len(sent), "all are consumed")

    assert (first.state, first.stage, first.done) == ("interrupted", 0, 1)
    assert (ended.state, ended.stage, ended.done, ended.failed) == ("done", 2, 5, 0)
    assert (done.done, done.not_found) == (4, [])
    assert tried.ids == sent


async def test_what_failed_after_a_stop_counts_in_its_stage(
    letters: Letters, database: DatabaseSettings, audit: Audit, stopped: Stopped
) -> None:
    await letters.put_all(4)

    async with consuming(letters, audit, fails=lambda _: True, does=stopped.stop):
        with session(database) as tables:
            job = order_letters(tables, RETRY, EVERYTHING, caution=Caution(stages=(2,), stop_when_failing=0.6))
            await run_letters(settings_of(tables.connection).database, letters.broker, job, begun=stopped.begun)
            await eventually(lambda: letters.has(4), "all are back")
            await run_letters(settings_of(tables.connection).database, letters.broker, read_job(tables, job.id))
            job = read_job(tables, job.id)

    assert (job.state, job.stage, job.done, job.failed) == ("paused", 1, 2, 2)
    assert job.paused_because == "letters that failed while a stage of 2 was tried: 2, or 100%, and at most 60% may"
