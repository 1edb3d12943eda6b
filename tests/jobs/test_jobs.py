"""Bulk work with parked rows as jobs: counted, paused, resumed, cancelled, in stages, set aside and brought back."""

import json
import threading

import psycopg
import pytest

from relay.errors import BusyError, NotFoundError, UsageError
from relay.jobs.job import Job, JobKind, JobState, cancel_job, job_lock, list_jobs, pause_job, read_job, resume_job
from relay.jobs.stages import Pacing
from relay.operate import release
from relay.operate.failures.groups import list_groups
from relay.operate.parked import Selection
from relay.operate.release import make_release, run_release
from tests.cli.command import Command
from tests.operate.rows import Rows

AUDIT = "SELECT command, target::bigint, done_by, why FROM outbox.operator_audit WHERE job = %s ORDER BY id"
EVERYTHING = Selection()


def states(rows: Rows) -> list[str]:
    return [state for state, _ in rows.states().values()]


def make(connection: psycopg.Connection, kind: JobKind, selection: Selection = EVERYTHING, **pacing: object) -> Job:
    return make_release(
        connection,
        "outbox",
        kind,
        selection,
        by="ada",
        why="a test",
        pacing=Pacing(**pacing),  # type: ignore[arg-type]
    )


def test_a_job_says_who_when_why_and_how_far(rows: Rows, connection: psycopg.Connection) -> None:
    first, second = rows.parked("1"), rows.parked("2")
    rows.parked("1", behind=first)

    made = make(connection, JobKind.RETRY, Selection(event_type="InvoiceIssued"), rate=1000.0)
    done = run_release(connection, "outbox", made)

    assert (made.state, made.selected, made.made_by, made.why) == (JobState.INTERRUPTED, 2, "ada", "a test")
    assert made.filter == {"event_type": "InvoiceIssued"}
    assert done.job == read_job(connection, "outbox", made.id) == list_jobs(connection, "outbox", limit=5)[0]
    assert (done.job.state, done.job.done, done.job.released, done.job.rate) == (JobState.DONE, 2, 1, 1000)
    assert rows.connection.execute(AUDIT, [made.id]).fetchall() == [
        ("parked retry", first, "ada", "a test"),
        ("parked retry", second, "ada", "a test"),
    ]


def test_a_paused_job_does_nothing_until_it_is_resumed(
    rows: Rows, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "BATCH_HEADS", 2)
    for key in range(5):
        rows.parked(str(key))
    made = make(connection, JobKind.RETRY)

    def pause(_: Job) -> None:
        pause_job(rows.connection, "outbox", made.id, by="bob", why="lunch")

    paused = run_release(connection, "outbox", made, show=pause)
    again = run_release(connection, "outbox", made)
    resumed = run_release(connection, "outbox", resume_job(connection, "outbox", made.id, by="bob"))

    assert paused.job is not None
    assert (paused.chosen, paused.job.state, paused.job.paused_by, paused.job.paused_why) == (
        2,
        "paused",
        "bob",
        "lunch",
    )
    assert again.chosen == 2
    assert resumed.job is not None
    assert (resumed.chosen, resumed.job.state, resumed.job.paused_at) == (5, JobState.DONE, None)
    assert states(rows) == ["pending"] * 5


def test_a_cancelled_job_ends_for_good(
    rows: Rows, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "BATCH_HEADS", 1)
    rows.parked("1")
    rows.parked("2")
    made = make(connection, JobKind.RETRY)

    def cancel(_: Job) -> None:
        cancel_job(rows.connection, "outbox", made.id, by="bob", why="wrong")

    ended = run_release(connection, "outbox", made, show=cancel)

    assert ended.job is not None
    assert (ended.chosen, ended.job.state, ended.job.cancelled_by) == (1, JobState.CANCELLED, "bob")
    assert states(rows) == ["pending", "parked"]
    for change in (pause_job, cancel_job, resume_job):
        with pytest.raises(UsageError, match="is cancelled: there is nothing to"):
            change(connection, "outbox", made.id, by="bob", why="x")


def test_one_process_runs_a_job(rows: Rows, connection: psycopg.Connection) -> None:
    rows.parked()
    made = make(connection, JobKind.RETRY)
    with job_lock(rows.connection, "outbox", made):
        running = read_job(connection, "outbox", made.id)
        with pytest.raises(BusyError):
            run_release(connection, "outbox", made)

    assert running.state is JobState.RUNNING
    assert run_release(connection, "outbox", made).chosen == 1
    with pytest.raises(NotFoundError):
        read_job(connection, "outbox", made.id + 1)


def test_a_job_that_is_told_to_stop_goes_on_later(rows: Rows, connection: psycopg.Connection) -> None:
    rows.parked()
    made = make(connection, JobKind.RETRY)
    stopping = threading.Event()
    stopping.set()

    stopped = run_release(connection, "outbox", made, stopping=stopping)
    resumed = run_release(connection, "outbox", made)

    assert stopped.job is not None
    assert (stopped.chosen, stopped.job.state, resumed.chosen) == (0, JobState.INTERRUPTED, 1)


def test_what_is_archived_keeps_its_reason_and_is_restored(rows: Rows, connection: psycopg.Connection) -> None:
    head = rows.parked("1")
    follower = rows.parked("1", behind=head)
    other = rows.parked("2")
    (before,) = list_groups(connection, "outbox")

    archived = run_release(connection, "outbox", make(connection, JobKind.ARCHIVE, Selection(ids=[head])))
    while_away = rows.states()
    assert archived.job is not None
    restored = run_release(connection, "outbox", make(connection, JobKind.RESTORE, Selection(job=archived.job.id)))

    assert (archived.chosen, archived.released, restored.chosen) == (1, 1, 1)
    assert while_away == {head: ("archived", None), follower: ("pending", None), other: ("parked", None)}
    assert rows.states()[head] == ("parked", None)
    (after,) = list_groups(connection, "outbox")
    assert (before.keys_held, before.rows_held, after.keys_held) == (1, 1, 0)
    assert (after.id, after.cause, after.count) == (before.id, before.cause, 2)


def test_a_stage_waits_for_its_rows_and_pauses_when_they_come_back(rows: Rows, connection: psycopg.Connection) -> None:
    first, second, third = (rows.parked(str(key)) for key in range(3))
    made = make(connection, JobKind.RETRY, stages=(1, 1), stop_when_failing=0.5)
    looks: list[int] = []

    def relay_sends_the_first_and_parks_the_second(job: Job) -> None:
        looks.append(job.done)
        if job.done == 1:
            rows.connection.execute("DELETE FROM outbox.message WHERE id = %s", [first])  # as a mark takes it away
        else:
            rows.connection.execute(
                "UPDATE outbox.message SET state = 'parked', parked_at = now() WHERE id = %s AND state = 'pending'",
                [second],
            )

    paused = run_release(connection, "outbox", made, show=relay_sends_the_first_and_parks_the_second)
    resumed = run_release(connection, "outbox", resume_job(connection, "outbox", made.id, by="ada"))

    assert looks[0] == 1
    assert paused.job is not None
    assert (paused.chosen, paused.job.stage, paused.job.failed) == (2, 2, 1)
    assert (paused.job.state, paused.job.paused_why) == (JobState.PAUSED, "stage 2: 1 of 1 rows came back")
    assert resumed.job is not None
    assert (resumed.chosen, resumed.job.state) == (3, JobState.DONE)
    assert rows.states() == {second: ("parked", None), third: ("pending", None)}


def test_the_command_retries_a_group_and_lists_the_job(relay: Command, rows: Rows) -> None:
    wanted, other = rows.parked("1"), rows.parked("2", event_type="InvoicePaid")
    groups = json.loads(relay("failures", "list", "--output", "json").out)
    (group,) = [each["id"] for each in groups if each["event_type"] == "InvoiceIssued"]

    retried = relay("parked", "retry", "--group", group, "--why", "fixed", "--output", "json")
    listed = json.loads(relay("jobs", "list", "--output", "json").out)
    shown = relay("failures", "show", group)

    assert retried.code == 0, retried.err
    assert json.loads(retried.out) == {"chosen": 1, "released": 0, "not_found": [], "job": 1, "state": "done"}
    assert [(job["kind"], job["state"], job["done"], job["filter"]) for job in listed] == [
        ("retry", "done", 1, {"group": group})
    ]
    assert rows.states() == {wanted: ("pending", None), other: ("parked", None)}
    assert (shown.code, "nothing that failed is in group" in shown.err) == (1, True)


def test_the_command_archives_pauses_and_restores(relay: Command, rows: Rows) -> None:
    row = rows.parked()

    archived = relay("parked", "archive", str(row), "--why", "later", "--yes")
    told = relay("parked", "retry", str(row))
    paused = relay("jobs", "pause", "1")
    restored = relay("parked", "restore", "--job", "1")

    assert archived.out == "archived 1 row, and released 0 held behind it\n"
    assert f"{row} is not parked: it is archived" in told.err
    assert "archive 1 is done: there is nothing to pause" in paused.err
    assert restored.out == "restored 1 row\n"
    assert states(rows) == ["parked"]
