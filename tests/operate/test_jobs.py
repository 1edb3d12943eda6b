"""Bulk work over rows is a job: counted, paused, resumed, cancelled, in stages, and each row is in the audit once."""

from collections.abc import Callable

import psycopg
import pytest

from relay.errors import UsageError
from relay.jobs import runner
from relay.jobs.job import (
    Caution,
    Job,
    Kind,
    cancel_job,
    list_failures,
    list_jobs,
    pause_job,
    read_job,
    resume_job,
)
from relay.jobs.words import outcome_of
from relay.operate.parked import work as parked
from relay.operate.parked.read import ParkedSelection
from relay.operate.parked.work import order_rows
from relay.servers.postgres.tables import Tables
from relay.testing.servers.process import wait_for
from tests.operate.rows import Rows
from tests.operate.settler import Settler
from tests.support.bulk import change_rows, run_rows

EVERYTHING = ParkedSelection()
AUDIT = """
    SELECT target::bigint, command, done_by, why, job FROM outbox.operator_audit
    WHERE command LIKE 'parked %' ORDER BY id
"""
PENDING = ("pending", None)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked.ParkedWork, "most", 2)


def at(done: int, call: Callable[[], object]) -> Callable[[Job], None]:
    """Return a function that takes a job's progress, and calls once, when so many rows are done."""
    called = False

    def show(job: Job) -> None:
        nonlocal called
        if job.done >= done and not called:
            called = True
            call()

    return show


def test_a_job_tells_who_when_why_what_and_how_far(rows: Rows, connection: psycopg.Connection, tables: Tables) -> None:
    for key in "abc":
        rows.parked(key)
    rows.parked("a", behind=1)

    done = change_rows(connection, Kind.RETRY, ParkedSelection(event_type="InvoiceIssued"), by="ada", why="mended")

    (job,) = list_jobs(tables, limit=9)
    assert (job.id, job.kind, job.source, job.state) == (done.job, Kind.RETRY, "parked", "done")
    assert (job.made_by, job.why, job.filter) == ("ada", "mended", {"event_type": "InvoiceIssued"})
    assert (job.selected, job.done, job.released, job.failed) == (3, 3, 1, 0)


def test_each_row_is_in_the_audit_once_with_its_job(rows: Rows, connection: psycopg.Connection) -> None:
    ids = [rows.parked(str(number)) for number in range(5)]

    done = change_rows(connection, Kind.ARCHIVE, EVERYTHING, by="ada", why="later")

    assert rows.connection.execute(AUDIT).fetchall() == [
        (id_, "parked archive", "ada", "later", done.job) for id_ in ids
    ]


def test_what_is_archived_comes_back_as_it_was(rows: Rows, connection: psycopg.Connection) -> None:
    head = rows.parked()
    follower = rows.parked(behind=head)
    read = "SELECT attempts, last_error, parked_at FROM outbox.message WHERE id = %s"
    before = rows.connection.execute(read, [head]).fetchone()

    archived = change_rows(connection, Kind.ARCHIVE, EVERYTHING, by="ada", why="later")
    meanwhile = rows.states()
    restored = change_rows(connection, Kind.RESTORE, ParkedSelection(ids=[head, follower]))

    assert (archived.chosen, archived.released) == (1, 1)
    assert meanwhile == {head: ("archived", None), follower: PENDING}
    assert (restored.chosen, restored.released) == (1, 0)
    assert restored.not_found == [f"{follower} is not archived: it is pending"]
    assert rows.states() == {head: ("parked", None), follower: PENDING}
    assert rows.connection.execute(read, [head]).fetchone() == before


def test_a_cancelled_job_cannot_go_on(rows: Rows, tables: Tables) -> None:
    rows.parked()
    job = order_rows(tables, Kind.DISCARD, EVERYTHING, by="ada", why="test")

    ended = cancel_job(tables, job.id, by="bob", why="the wrong ones")

    assert (ended.state, ended.cancelled_by, ended.cancelled_why) == ("cancelled", "bob", "the wrong ones")
    calls: list[Callable[[], object]] = [
        lambda: resume_job(tables, job.id, by="bob"),
        lambda: pause_job(tables, job.id, by="bob", why=None),
        lambda: cancel_job(tables, job.id, by="bob", why="again"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"job 1 \(discard\) is cancelled: there is nothing to"):
            call()


def test_a_resumed_job_keeps_its_limit_and_leaves_what_was_parked_later(
    rows: Rows, connection: psycopg.Connection, tables: Tables
) -> None:
    ids = [rows.parked(str(number)) for number in range(4)]
    job = order_rows(tables, Kind.RETRY, ParkedSelection(limit=3))
    run_rows(connection, job, show=at(2, lambda: pause_job(tables, job.id, by="ada", why=None)))
    later = rows.parked("later")

    done = run_rows(connection, resume_job(tables, job.id, by="ada"))

    assert (done.state, done.done) == ("done", 3)
    assert [id_ for id_, (state, _) in rows.states().items() if state == "parked"] == [ids[3], later]


def test_a_stage_waits_for_the_outcome_of_its_rows(
    rows: Rows, connection: psycopg.Connection, tables: Tables, database_url: str
) -> None:
    ids = [rows.parked(str(number)) for number in range(7)]
    caution = Caution(stages=(1, 3), stop_when_failing=0.5)
    seen: list[tuple[int, int]] = []

    with Settler(database_url, fails=lambda id_: id_ == ids[2]) as settler:
        done = change_rows(
            connection,
            Kind.RETRY,
            EVERYTHING,
            caution=caution,
            show=lambda job: seen.append((job.stage, job.done)),
        )
        wait_for(lambda: (rows.states()[ids[-1]][0]) == "sent", "the last is sent", 10)

    job = read_job(tables, done.job or 0)
    assert (job.state, job.stage, job.done, job.failed) == ("done", 2, 7, 1)
    assert all(stage >= sum(count > each for each in caution.stages) for stage, count in seen)
    assert [(each.id, each.reason) for each in list_failures(tables, job.id, limit=9)] == [(ids[2], "not again")]
    assert settler.most_pending <= 4


def test_a_stage_that_fails_too_often_pauses_the_job(
    rows: Rows, connection: psycopg.Connection, tables: Tables, database_url: str
) -> None:
    ids = [rows.parked(str(number)) for number in range(6)]
    caution = Caution(stages=(2, 4), stop_when_failing=0.4)

    with Settler(database_url, fails=lambda id_: id_ == ids[0]):
        done = change_rows(connection, Kind.RETRY, EVERYTHING, caution=caution)
        paused = read_job(tables, done.job or 0)
        left = [id_ for id_, (state, _) in rows.states().items() if state == "parked"]
        resumed = run_rows(connection, resume_job(tables, paused.id, by="ada"))

    assert (paused.state, paused.stage, paused.done, paused.failed) == ("paused", 1, 2, 1)
    assert paused.paused_because == "1 of 2 rows of the stage failed again: 50%, and at most 40% may"
    assert left == [ids[0], *ids[2:]]
    assert (resumed.state, resumed.done, resumed.failed) == ("done", 6, 1)
    assert rows.connection.execute("SELECT count(*) FROM outbox.job_row").fetchone() == (0,)


def test_a_job_with_fewer_rows_than_its_stage_waits_for_theirs(
    rows: Rows, connection: psycopg.Connection, tables: Tables, database_url: str
) -> None:
    row = rows.parked()

    with Settler(database_url, fails=lambda _: True):
        done = change_rows(connection, Kind.RETRY, EVERYTHING, caution=Caution(stages=(10,), stop_when_failing=0))

    job = read_job(tables, done.job or 0)
    assert (job.state, job.done, job.failed) == ("paused", 1, 1)
    assert rows.states() == {row: ("parked", None)}
    assert run_rows(connection, resume_job(tables, job.id, by="ada")).state == "done"


def test_what_has_no_outcome_has_no_stages(tables: Tables) -> None:
    with pytest.raises(UsageError, match="--stages waits for the outcome of rows; a discard has no outcome"):
        order_rows(tables, Kind.DISCARD, EVERYTHING, caution=Caution(stages=(1,)))


def test_what_is_parked_again_is_counted_and_listed(
    rows: Rows, connection: psycopg.Connection, database_url: str, tables: Tables
) -> None:
    ids = [rows.parked(str(number)) for number in range(6)]
    rows.node(age=-3600)  # alive for as long as it takes

    with Settler(database_url, fails=lambda id_: id_ in ids[:4]):
        done = change_rows(connection, Kind.RETRY, EVERYTHING)

    job = read_job(tables, done.job or 0)
    assert (job.state, job.done, job.failed, job.watched, job.waiting) == ("done", 6, 4, 6, 0)
    assert outcome_of(job) == "of 6: 4 parked again, 2 sent"
    assert [each.id for each in list_failures(tables, job.id, limit=9)] == ids[:4]
    assert rows.connection.execute("SELECT count(*) FROM outbox.job_row").fetchone() == (0,)


def test_stages_and_the_rest_are_one_outcome(
    rows: Rows, connection: psycopg.Connection, database_url: str, tables: Tables
) -> None:
    ids = [rows.parked(str(number)) for number in range(6)]
    rows.node(age=-3600)

    with Settler(database_url, fails=lambda id_: id_ in (ids[0], ids[5])):
        done = change_rows(connection, Kind.RETRY, EVERYTHING, caution=Caution(stages=(2,), stop_when_failing=0.5))

    job = read_job(tables, done.job or 0)
    assert outcome_of(job) == "of 6: 2 parked again, 4 sent"
    assert [each.id for each in list_failures(tables, job.id, limit=9)] == [ids[0], ids[5]]


@pytest.mark.parametrize("is_alive", [False, True])
def test_rows_that_do_not_go_out_are_waited_for_while_a_relay_is_alive(
    rows: Rows, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, is_alive: bool, tables: Tables
) -> None:
    for number in range(3):
        rows.parked(str(number))
    rows.node(age=-3600 if is_alive else 60)
    monkeypatch.setattr(runner, "WATCH", 1.5)
    looks: list[int | None] = []

    done = change_rows(connection, Kind.RETRY, EVERYTHING, show=lambda job: looks.append(job.waiting))

    job = read_job(tables, done.job or 0)
    assert (job.state, outcome_of(job)) == ("done", "of 3: 3 not sent yet")
    looks_behind = len(looks[2:])  # behind two batches
    assert looks_behind > 1 if is_alive else looks_behind == 1
    assert rows.connection.execute("SELECT count(*) FROM outbox.job_row").fetchone() == (0,)


def test_of_many_rows_the_first_are_watched_and_the_count_says_so(
    rows: Rows, connection: psycopg.Connection, database_url: str, monkeypatch: pytest.MonkeyPatch, tables: Tables
) -> None:
    for number in range(8):
        rows.parked(str(number))
    rows.node(age=-3600)
    monkeypatch.setattr(parked, "MOST_WATCHED", 3)

    with Settler(database_url, fails=lambda _: True):
        done = change_rows(connection, Kind.RETRY, EVERYTHING)

    job = read_job(tables, done.job or 0)
    assert outcome_of(job) == "of the first 4 of 8: at least 4 parked again"


def test_a_job_that_is_stopped_while_it_watches_watches_on(
    rows: Rows, connection: psycopg.Connection, database_url: str, tables: Tables
) -> None:
    ids = [rows.parked(str(number)) for number in range(6)]
    rows.node(age=-3600)
    job = order_rows(tables, Kind.RETRY, EVERYTHING)

    def pause(job: Job) -> None:
        if job.waiting:
            pause_job(tables, job.id, by="ada", why=None)

    paused = run_rows(connection, job, show=pause)
    with Settler(database_url, fails=lambda id_: id_ == ids[3]):
        ended = run_rows(connection, resume_job(tables, job.id, by="ada"))

    assert (paused.state, paused.done, paused.waiting) == ("paused", 6, 6)
    assert (ended.state, ended.done, outcome_of(ended)) == ("done", 6, "of 6: 1 parked again, 5 sent")


def test_a_discard_has_no_outcome(rows: Rows, connection: psycopg.Connection, tables: Tables) -> None:
    rows.parked()
    rows.node(age=-3600)

    done = change_rows(connection, Kind.DISCARD, EVERYTHING, by="ada", why="a test")

    job = read_job(tables, done.job or 0)
    assert (job.state, job.watched, outcome_of(job)) == ("done", None, None)
