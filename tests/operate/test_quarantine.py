"""A row that tries its route just now is waited for, and left alone when it does not come back."""

import threading

import psycopg
import pytest

from relay.jobs.job import Job
from relay.operate.routes import work as quarantine_job
from relay.operate.routes.quarantine import list_routes
from relay.operate.routes.work import order_discard
from relay.servers.postgres.tables import Tables
from tests.operate.rows import Rows
from tests.support.bulk import run_rows
from tests.support.process import wait_for

BY, WHY = "ada", "too late"
TRY = "UPDATE outbox.message SET state = 'pending' WHERE id = %s"  # as the relay does, which keeps the route's number
PUT_BACK = "UPDATE outbox.message SET state = 'quarantined' WHERE id = %s"


def discard(connection: psycopg.Connection) -> Job:
    """Discard the rows of the only route by a job."""
    (route,) = list_routes(Tables(connection, "outbox"))
    return run_rows(connection, order_discard(Tables(connection, "outbox"), route, [], by=BY, why=WHY))


def test_a_probe_that_comes_back_is_changed_with_the_others(rows: Rows, connection: psycopg.Connection) -> None:
    probe, other = rows.quarantined("gone"), rows.quarantined("gone", "2")
    rows.connection.execute(TRY, [probe])
    done: list[Job] = []

    changing = threading.Thread(target=lambda: done.append(discard(connection)))
    changing.start()
    looked = "SELECT FROM pg_stat_activity WHERE query = 'COMMIT' AND datname = current_database()"
    wait_for(lambda: rows.connection.execute(looked).rowcount > 0, "it has looked", 10)
    rows.connection.execute(PUT_BACK, [probe])
    changing.join(10)

    assert [(job.state, job.selected, job.done) for job in done] == [("done", 2, 2)]
    assert rows.states() == {probe: ("discarded", None), other: ("discarded", None)}


def test_a_probe_that_stays_away_is_left_out(
    rows: Rows, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine_job, "PROBE_WAIT", 0.0)
    probe, other = rows.quarantined("gone"), rows.quarantined("gone", "2")
    rows.connection.execute(TRY, [probe])

    job = discard(connection)

    assert (job.state, job.selected, job.done) == ("done", 2, 1)
    assert rows.states() == {probe: ("pending", None), other: ("discarded", None)}


def test_a_route_that_works_by_now_ends_the_job(rows: Rows, connection: psycopg.Connection, tables: Tables) -> None:
    row = rows.quarantined("gone")
    (route,) = list_routes(tables)
    job = order_discard(tables, route, [], by=BY, why=WHY)
    rows.connection.execute("UPDATE outbox.message SET state = 'pending', quarantine = NULL")
    rows.connection.execute("DELETE FROM outbox.quarantine")

    ended = run_rows(connection, job)

    assert (ended.state, ended.selected, ended.done) == ("done", 1, 0)
    assert rows.states() == {row: ("pending", None)}


def test_what_comes_after_the_order_stays(rows: Rows, connection: psycopg.Connection, tables: Tables) -> None:
    rows.quarantined("gone")
    (route,) = list_routes(tables)
    job = order_discard(tables, route, [], by=BY, why=WHY)
    later = rows.quarantined("gone", "2")

    run_rows(connection, job)

    assert rows.states()[later] == ("quarantined", None)
