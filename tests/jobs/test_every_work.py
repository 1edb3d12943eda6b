"""Every work goes through the same list: killed, cut off, paused, cancelled, stopped, slowed down, and in stages."""

import asyncio
from contextlib import suppress

import psycopg
import pytest

from relay.errors import BusyError, OutboxError
from relay.jobs.job import Caution, Job, JobState, cancel_job, pause_job, read_job, resume_job
from relay.jobs.runner import Run, Show
from relay.operate.letters import trial
from relay.servers.postgres.tables import Tables
from tests.jobs.benches import ROWS, Bench
from tests.jobs.points import Killed, Points, What
from tests.operate.rows import Rows
from tests.support.publication import publish_all

LAST = 25  # statements: a step of each work has fewer
SLOW = 10.0  # rows a second
STAGES = (4, 10)


def run_of(bench: Bench, job: Job, *, show: Show = lambda _: None) -> Run:
    return Run("outbox", job, bench.work(job), drain_timeout=5, show=show)


async def ended(bench: Bench, connection: psycopg.Connection, job: Job) -> Job:
    """Run a job to its end, and see that it has done everything."""
    done = await run_of(bench, job).run()
    assert (done.state, done.selected, done.done, done.failed) == (JobState.DONE, ROWS, ROWS, 0)
    assert read_job(Tables(connection, "outbox"), job.id).state is JobState.DONE
    await bench.check(connection, done)
    return done


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", [What.KILLED, What.LOST])
async def test_a_job_that_is_killed_or_cut_off_at_each_point_goes_on(
    bench: Bench, connection: psycopg.Connection, tables: Tables, database_url: str, what: What
) -> None:
    job = await bench.order(connection)
    for at in range(1, LAST, bench.stride):
        points = Points(database_url, job.id, what, at=at, behind=bool(at % 2))
        with points.watched(), suppress(Killed, BaseExceptionGroup, OutboxError, psycopg.Error):
            await run_of(bench, job).run()
        saved = read_job(tables, job.id)
        await bench.check(connection, saved)
        if saved.is_over:
            return
    await ended(bench, connection, job)


async def test_a_job_does_all_under_a_publication_of_all_tables(
    bench: Bench, connection: psycopg.Connection, rows: Rows
) -> None:
    job = await bench.order(connection)
    rows.connection.execute(publish_all(rows.connection.info.server_version))

    await ended(bench, connection, job)


async def test_a_paused_job_does_no_more_and_goes_on(
    bench: Bench, connection: psycopg.Connection, tables: Tables
) -> None:
    job = await bench.order(connection, Caution(rate=SLOW))

    def pause(_: Job) -> None:
        now = read_job(tables, job.id)
        if now.done and now.state is JobState.RUNNING:
            pause_job(tables, job.id, by="bob", why="lunch")

    paused = await run_of(bench, job, show=pause).run()
    saved = read_job(tables, job.id)
    resume_job(tables, job.id, by="bob")

    assert (paused.state, paused.paused_because) == (JobState.PAUSED, "paused by bob: lunch")
    assert 0 < saved.done < ROWS
    assert paused.done == saved.done
    await ended(bench, connection, job)


async def test_a_cancelled_job_does_no_more(bench: Bench, connection: psycopg.Connection, tables: Tables) -> None:
    job = await bench.order(connection, Caution(rate=SLOW))

    def cancel(_: Job) -> None:
        now = read_job(tables, job.id)
        if now.done and now.state is JobState.RUNNING:
            cancel_job(tables, job.id, by="bob", why="the wrong ones")

    cancelled = await run_of(bench, job, show=cancel).run()

    assert cancelled.state is JobState.CANCELLED
    assert cancelled.done < ROWS
    assert (await run_of(bench, job).run()).state is JobState.CANCELLED
    assert read_job(tables, job.id).done == cancelled.done


async def test_a_job_that_is_told_to_stop_saves_and_goes_on(
    bench: Bench, connection: psycopg.Connection, tables: Tables
) -> None:
    job = await bench.order(connection, Caution(rate=SLOW))
    run = run_of(bench, job, show=lambda seen: run.stop() if seen.done else None)

    stopped = await run.run()
    saved = read_job(tables, job.id)

    assert stopped.state is JobState.INTERRUPTED
    assert 0 < stopped.done < ROWS
    assert (saved.state, saved.done, saved.position) == (JobState.INTERRUPTED, stopped.done, stopped.position)
    await bench.check(connection, saved)
    await ended(bench, connection, job)


async def test_a_rate_is_kept(bench: Bench, connection: psycopg.Connection) -> None:
    job = await bench.order(connection, Caution(rate=2 * SLOW))
    began = asyncio.get_running_loop().time()

    await ended(bench, connection, job)

    # A work in transactions saves up to 0.4 s worth of rows.
    assert asyncio.get_running_loop().time() - began >= (ROWS - 1) / (2 * SLOW) - 0.5


async def test_one_process_runs_a_job(bench: Bench, connection: psycopg.Connection, tables: Tables) -> None:
    job = await bench.order(connection, Caution(rate=SLOW))
    busy: list[BaseException] = []
    others: list[asyncio.Task[None]] = []

    async def run_another() -> None:
        for call in (
            run_of(bench, job).run(),
            asyncio.to_thread(resume_job, tables, job.id, by="bob"),
        ):
            try:
                await call
            except BusyError as error:
                busy.append(error)
        first.stop()

    def begin_another(_: Job) -> None:
        if not others:
            others.append(asyncio.create_task(run_another()))

    first = run_of(bench, job, show=begin_another)
    await first.run()
    await asyncio.gather(*others)

    assert [str(each) for each in busy] == [f"{job.words} is run by another process"] * 2


async def test_a_stage_waits_for_its_outcome_and_pauses_when_too_many_fail(
    bench: Bench, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LOOK_INTERVAL", 0.05)
    job = await bench.order(connection, Caution(stages=STAGES, stop_when_failing=0.4), failing=2)
    if bench.fails_in is None:
        with pytest.raises(OutboxError, match=f"{STAGES[0]} rows are done.*what is discarded has no outcome"):
            await run_of(bench, job).run()
        return
    seen: list[tuple[int, int]] = []
    pauses: list[Job] = []

    def show(job: Job) -> None:
        seen.append((job.stage, job.tried))

    async with bench.settling():
        ended = await run_of(bench, job, show=show).run()
        while ended.state is JobState.PAUSED:
            pauses.append(ended)
            resume_job(Tables(connection, "outbox"), job.id, by="bob")
            ended = await run_of(bench, job, show=show).run()

    first, behind = bench.fails_in
    assert [(each.stage, each.tried) for each in pauses] == [*enumerate(STAGES, 1)][: 1 + bool(behind)]
    assert (pauses[0].failed, ended.failed) == (first, first + behind)
    assert (ended.state, ended.stage, ended.tried) == (JobState.DONE, 2, ROWS)
    assert all(stage >= sum(tried > each for each in STAGES) for stage, tried in seen)
