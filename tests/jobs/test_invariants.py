"""What holds of the runner whatever happens to it, drawn: each row is counted once, and saved is what is done.

The toy work has no lock on its job while it works: `save` alone keeps what an operator has paused or cancelled.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.config.settings import DatabaseSettings
from relay.errors import OutboxError
from relay.jobs.job import Caution, Job, JobState, Kind, Order, Source, make_job, read_job, resume_job
from relay.jobs.runner import Run
from relay.operate.session import session
from relay.servers.postgres.tables import Tables
from tests.jobs.points import Killed, Points, What
from tests.jobs.toy import FILL, MAKE, ToyWork
from tests.support.eventually import eventually

ROWS = 10
READ = """
    SELECT count(*) FILTER (WHERE times = 1), count(*) FILTER (WHERE times > 1), max(id) FILTER (WHERE times > 0)
    FROM public.number
"""

Happening = tuple[What, int, bool]  # what, at which statement, and whether before or behind it

happenings = st.lists(
    st.tuples(st.sampled_from([What.KILLED, What.LOST, What.PAUSED]), st.integers(1, 16), st.booleans()), max_size=4
)


def order(connection: psycopg.Connection, caution: Caution) -> Job:
    """Make ten numbers, and a job over them."""
    connection.execute("DROP TABLE IF EXISTS public.number")
    connection.execute(MAKE)
    connection.execute(FILL, [ROWS])
    given = Order(kind=Kind.RETRY, source=Source.PARKED, filter={}, by="ada", selected=ROWS, caution=caution)
    return make_job(Tables(connection, "outbox"), given)


async def run(database: DatabaseSettings, job: Job) -> Job:
    return await Run("outbox", job, ToyWork(database, job), drain_timeout=5).run()


def is_running(connection: psycopg.Connection, job: Job) -> bool:
    """Whether a session has the lock of the job: that of a dead process has it until the server notices."""
    return read_job(Tables(connection, "outbox"), job.id).state is JobState.RUNNING


def check(connection: psycopg.Connection, job: Job) -> None:
    """See that the job's row tells what was done, and no more."""
    saved = read_job(Tables(connection, "outbox"), job.id)
    row = connection.execute(READ).fetchone()
    assert row is not None
    once, more, last = row
    assert more == 0
    assert saved.done == once
    assert saved.position == (last or 0)
    if saved.state is JobState.DONE:
        assert once == ROWS


@given(happenings=happenings, stages=st.sampled_from([(), (1, 4), (5,), (10,), (20,)]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_each_row_is_counted_once_whatever_happens(
    database: DatabaseSettings, happenings: Sequence[Happening], stages: tuple[int, ...]
) -> None:
    with session(database) as tables:
        job = order(tables.connection, Caution(stages=stages))
        for what, at, behind in happenings:
            points = Points(database.url.get_secret_value(), job.id, what, at=at, behind=behind)
            with points.watched(), suppress(Killed, OutboxError, psycopg.Error):
                await run(database, job)
            at_the_turn = read_job(tables, job.id).done
            await points.settled()
            await eventually(
                lambda: not is_running(tables.connection, job), "the server has noticed the end of the session"
            )
            check(tables.connection, job)
            if read_job(tables, job.id).is_over:
                break
            if points.has_turned:
                assert read_job(tables, job.id).state is JobState.PAUSED
                assert read_job(tables, job.id).done == at_the_turn
            resume_job(tables, job.id, by="ada")  # each run gets the job as it was ordered
        ended = await run(database, job)
        check(tables.connection, job)

    assert (ended.state, ended.done) == (JobState.DONE, ROWS)
    assert ended.failed == sum(number % 2 for number in range(1, min(ROWS, max(stages, default=0)) + 1))
    assert ended.stage == sum(each <= ROWS for each in stages) or stages == (20,)


@pytest.mark.parametrize("behind", [False, True])
async def test_a_cancelled_job_changes_nothing_more(database: DatabaseSettings, behind: bool) -> None:
    with session(database) as tables:
        turned = 0
        for at in range(1, 12):
            job = order(tables.connection, Caution())
            points = Points(database.url.get_secret_value(), job.id, What.CANCELLED, at=at, behind=behind)
            with points.watched():
                ended = await run(database, job)
            await points.settled()
            check(tables.connection, job)
            assert ended.state is (JobState.CANCELLED if points.has_turned else JobState.DONE)
            turned += points.has_turned
    assert turned > 5


async def test_a_job_that_runs_is_run_once(database: DatabaseSettings) -> None:
    with session(database) as tables:
        job = order(tables.connection, Caution(rate=20))
        ends = await asyncio.gather(run(database, job), run(database, job), return_exceptions=True)
        check(tables.connection, job)

    (refused,) = [str(each) for each in ends if isinstance(each, OutboxError)]
    assert refused == "job 1 (retry) is run by another process"
