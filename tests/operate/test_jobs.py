"""Bulk work over rows is a job: counted, paused, resumed, cancelled, in stages, and each row is in the audit once."""

import threading
from collections.abc import Callable

import psycopg
import pytest

from relay.errors import UsageError
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
from relay.operate.parked import work as parked
from relay.operate.parked.read import ParkedSelection
from relay.operate.parked.work import order_rows
from relay.servers.postgres.tables import Tables
from tests.operate.rows import Rows
from tests.support.bulk import change_rows, run_rows
from tests.support.process import wait_for

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


class Broker:
    """Settles what becomes pending, as a relay does: sent, or parked again."""

    def __init__(self, url: str, fails: Callable[[int], bool]) -> None:
        self._url = url
        self._fails = fails
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_pending = 0

    def __enter__(self) -> "Broker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stop.wait(0.01):
                pending = connection.execute("SELECT id FROM outbox.message WHERE state = 'pending' ORDER BY id")
                ids = [id_ for (id_,) in pending]
                self.most_pending = max(self.most_pending, len(ids))
                for id_ in ids:
                    self._settle(connection, id_)

    def _settle(self, connection: psycopg.Connection, id_: int) -> None:
        if self._fails(id_):
            connection.execute(
                "UPDATE outbox.message SET state = 'parked', parked_at = clock_timestamp(), last_error = 'not again'"
                " WHERE id = %s",
                [id_],
            )
        else:
            connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE id = %s", [id_])


def test_a_stage_waits_for_the_outcome_of_its_rows(
    rows: Rows, connection: psycopg.Connection, tables: Tables, database_url: str
) -> None:
    ids = [rows.parked(str(number)) for number in range(7)]
    caution = Caution(stages=(1, 3), stop_when_failing=0.5)
    seen: list[tuple[int, int]] = []

    with Broker(database_url, fails=lambda id_: id_ == ids[2]) as broker:
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
    assert broker.most_pending <= 4


def test_a_stage_that_fails_too_often_pauses_the_job(
    rows: Rows, connection: psycopg.Connection, tables: Tables, database_url: str
) -> None:
    ids = [rows.parked(str(number)) for number in range(6)]
    caution = Caution(stages=(2, 4), stop_when_failing=0.4)

    with Broker(database_url, fails=lambda id_: id_ == ids[0]):
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

    with Broker(database_url, fails=lambda _: True):
        done = change_rows(connection, Kind.RETRY, EVERYTHING, caution=Caution(stages=(10,), stop_when_failing=0))

    job = read_job(tables, done.job or 0)
    assert (job.state, job.done, job.failed) == ("paused", 1, 1)
    assert rows.states() == {row: ("parked", None)}
    assert run_rows(connection, resume_job(tables, job.id, by="ada")).state == "done"


def test_what_has_no_outcome_has_no_stages(tables: Tables) -> None:
    with pytest.raises(UsageError, match="--stages waits for the outcome of rows; a discard has no outcome"):
        order_rows(tables, Kind.DISCARD, EVERYTHING, caution=Caution(stages=(1,)))
