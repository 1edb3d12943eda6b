"""What was archived or discarded is parked again: one row, or all that one job has set aside."""

import psycopg
import pytest

from relay.jobs.job import Kind, Source, read_job
from relay.operate.parked import work as parked
from relay.operate.parked.read import ParkedSelection, show_parked
from relay.servers.postgres.tables import Tables
from tests.operate.rows import Rows
from tests.support.bulk import change_rows, discard, retry

PENDING, PARKED, DISCARDED = ("pending", None), ("parked", None), ("discarded", None)
KEPT = "SELECT attempts, last_error, parked_at FROM outbox.message WHERE id = %s"
WAY = "SELECT command, done_by, why FROM outbox.operator_audit WHERE target = %s ORDER BY id"


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked.ParkedWork, "most", 2)


def test_a_discarded_row_comes_back_as_it_was_and_the_audit_has_both(
    rows: Rows, connection: psycopg.Connection
) -> None:
    row, other = rows.parked("1"), rows.parked("2")
    before = rows.connection.execute(KEPT, [row]).fetchone()

    discarded = discard(connection, "outbox", ParkedSelection(ids=[row]), by="ada", why="test data")
    shown = show_parked(Tables(connection, "outbox"), row, length=100)
    restored = change_rows(
        connection, Kind.RESTORE, ParkedSelection(ids=[row]), by="bob", why="no test data", aside=Source.DISCARDED
    )

    assert (shown.state, shown.set_aside_by, shown.set_aside_note) == ("discarded", "ada", "test data")
    assert shown.set_aside_job == discarded.job
    assert (restored.chosen, restored.not_found) == (1, [])
    assert rows.states() == {row: PARKED, other: PARKED}
    assert rows.connection.execute(KEPT, [row]).fetchone() == before
    assert rows.connection.execute(WAY, [str(row)]).fetchall() == [
        ("parked discard", "ada", "test data"),
        ("parked restore", "bob", "no test data"),
    ]


def test_all_that_a_job_has_discarded_comes_back_and_nothing_else(rows: Rows, connection: psycopg.Connection) -> None:
    mine, again, others = [rows.parked(str(each)) for each in range(5)], rows.parked("7"), rows.parked("8")
    first = discard(connection, "outbox", ParkedSelection(ids=[*mine, again]), by="ada", why="one")
    change_rows(connection, Kind.RESTORE, ParkedSelection(ids=[again]), aside=Source.DISCARDED)
    discard(connection, "outbox", ParkedSelection(ids=[again, others]), by="ada", why="two")

    restored = change_rows(connection, Kind.RESTORE, ParkedSelection(job=first.job), by="ada", aside=Source.DISCARDED)

    assert restored.chosen == 5
    assert restored.job is not None
    job = read_job(Tables(connection, "outbox"), restored.job)
    assert (job.kind, job.source, job.selected) == (Kind.RESTORE, Source.DISCARDED, 5)
    assert rows.states() == {**dict.fromkeys(mine, PARKED), again: DISCARDED, others: DISCARDED}


def test_a_restored_row_goes_before_the_later_ones_of_its_key(rows: Rows, connection: psycopg.Connection) -> None:
    first = rows.parked()
    discard(connection, "outbox", ParkedSelection(ids=[first]), by="ada", why="test data")
    second = rows.parked()
    third = rows.parked(behind=second)
    change_rows(connection, Kind.RESTORE, ParkedSelection(ids=[first]), aside=Source.DISCARDED)

    retry(connection, "outbox", ParkedSelection(ids=[second]))

    assert rows.states() == {first: PARKED, second: PENDING, third: ("parked", first)}


def test_a_preview_counts_rows_and_keys(rows: Rows, connection: psycopg.Connection) -> None:
    ids = [rows.parked(key) for key in ("1", "2", "2", None)]
    rows.parked("1", behind=ids[0])

    discards = parked.preview(Tables(connection, "outbox"), Kind.DISCARD, ParkedSelection())
    done = discard(connection, "outbox", ParkedSelection(), by="ada", why="test data")
    assert done.job is not None
    restores = parked.preview(
        Tables(connection, "outbox"), Kind.RESTORE, ParkedSelection(job=done.job), aside=Source.DISCARDED
    )

    assert (discards.chosen, discards.keys, discards.released) == (4, 2, 1)
    assert (restores.chosen, restores.keys, restores.released) == (4, 2, 0)


def test_what_the_relay_has_discarded_itself_is_parked_with_its_reason(
    rows: Rows, connection: psycopg.Connection
) -> None:
    row = rows.pending(state="discarded", last_error="312 NO_ROUTE")

    change_rows(connection, Kind.RESTORE, ParkedSelection(ids=[row]), aside=Source.DISCARDED)

    (moment,) = rows.connection.execute("SELECT parked_at FROM outbox.message WHERE id = %s", [row]).fetchone() or [0]
    assert rows.states() == {row: PARKED}
    assert moment is not None
