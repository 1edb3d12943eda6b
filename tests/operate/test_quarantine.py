"""A row that tries its route just now is waited for, and left alone when it does not come back."""

import threading
from collections.abc import Callable

import psycopg
import pytest
from psycopg.sql import Identifier

from relay.jobs.job import Job
from relay.operate.failures import list_route_groups
from relay.operate.routes import work as quarantine_job
from relay.operate.routes.quarantine import IS_BEHIND, READ_ROUTES, Changed, list_routes, reroute
from relay.operate.routes.work import order_discard
from relay.servers.postgres.tables import Tables
from relay.testing.servers.process import wait_for
from tests.operate.rows import Rows
from tests.support.bulk import run_rows
from tests.support.plans import explain, scans

BY, WHY = "ada", "too late"
TRY = "UPDATE outbox.message SET state = 'pending' WHERE id = %s"  # as the relay does, which keeps the route's number
LOCK = "SELECT FROM outbox.quarantine FOR UPDATE"
LOOKED = """
    SELECT FROM pg_stat_activity
    WHERE state = 'idle' AND query LIKE '%state = ''pending'' AND quarantine = %' AND datname = current_database()
"""
PUT_BACK = "UPDATE outbox.message SET state = 'quarantined' WHERE id = %s"


def discard(connection: psycopg.Connection) -> Job:
    """Discard the rows of the only route by a job."""
    (route,) = list_routes(Tables(connection, "outbox"))
    return run_rows(connection, order_discard(Tables(connection, "outbox"), route, [], by=BY, why=WHY))


def change_while_one_comes_back(rows: Rows, database_url: str, probe: int, change: Callable[[], None]) -> None:
    """Change the route's rows while the relay brings its probe back, which takes the route's lock."""
    rows.connection.execute(TRY, [probe])
    changing = threading.Thread(target=change)
    with psycopg.connect(database_url) as relay:
        relay.execute(LOCK)
        changing.start()
        wait_for(lambda: rows.connection.execute(LOOKED).rowcount > 0, "it has looked", 20)
        relay.execute(PUT_BACK, [probe])
    changing.join(20)


def test_a_probe_that_comes_back_is_changed_with_the_others(
    rows: Rows, connection: psycopg.Connection, database_url: str
) -> None:
    probe, other = rows.quarantined("gone"), rows.quarantined("gone", "2")
    done: list[Job] = []

    change_while_one_comes_back(rows, database_url, probe, lambda: done.append(discard(connection)))

    assert [(job.state, job.selected, job.done) for job in done] == [("done", 2, 2)]
    assert rows.states() == {probe: ("discarded", None), other: ("discarded", None)}


def test_a_probe_that_comes_back_is_rerouted_with_the_others(rows: Rows, tables: Tables, database_url: str) -> None:
    probe, other = rows.quarantined("gone"), rows.quarantined("gone", "2")
    (route,) = list_routes(tables)
    done: list[Changed] = []

    def change() -> None:
        done.append(reroute(tables, route, [], exchange="", routing_key="there", by=BY, why=WHY))

    change_while_one_comes_back(rows, database_url, probe, change)

    assert [(each.rows, each.left_out) for each in done] == [(2, [])]
    moved = rows.connection.execute("SELECT id FROM outbox.message WHERE routing_key = 'there' ORDER BY id").fetchall()
    assert moved == [(probe,), (other,)]


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


def test_a_row_that_is_tried_is_counted_until_it_is_sent(rows: Rows, tables: Tables) -> None:
    row = rows.quarantined("gone")
    rows.probe(row)
    (tried,), (group,) = list_routes(tables), list_route_groups(tables)
    rows.connection.execute(PUT_BACK, [row])
    (back,) = list_routes(tables)

    assert (tried.rows, tried.probing, tried.waiting, group.count) == (0, 1, 1, 1)
    assert (back.rows, back.probing, back.waiting) == (1, 0, 1)


def test_a_look_for_the_row_that_is_tried_reads_no_backlog(rows: Rows, tables: Tables) -> None:
    row = rows.quarantined("gone")
    rows.connection.execute("ANALYZE outbox.message_pending")
    rows.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, event_type, payload, available_at)"
        " SELECT 'order', 'Placed', '{}', now() + n * interval '1 minute' FROM generate_series(1, 5000) AS n"
    )
    rows.probe(row)
    figures = {"initial": 0.5, "maximum": 5.0, "a_second": 20, "is_behind": IS_BEHIND}

    plan = explain(rows.connection, READ_ROUTES.format(schema=Identifier("outbox"), **figures))

    (pending,) = [scan for scan in scans(plan) if scan["Relation Name"] == "message_pending"]
    assert (pending["Index Name"], pending["Actual Rows"]) == ("message_pending_available_at", 1)
