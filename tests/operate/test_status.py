"""The status tells the truth about backlog, relays and progress, from the tables alone."""

import re
import threading
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import sql

from relay.config.settings import DatabaseSettings
from relay.engine.session.session import LANES
from relay.errors import AccessError, DatabaseUnavailableError, DeadlineError, NotReadyError, SchemaError
from relay.operate.health import OutboxState, check_health
from relay.operate.lanes import pause_lane
from relay.operate.runbooks import Runbook
from relay.operate.session import session
from relay.operate.status import BY_INDEX, OLDEST_PENDING, About, Status, read_status
from relay.servers.postgres.tables import Tables
from relay.testing.servers.postgres import PostgresServer
from tests.operate.rows import Rows


def read(connection: psycopg.Connection) -> Status:
    return read_status(Tables(connection, "outbox"), progress_timeout=0.3)


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


@pytest.mark.every_postgres
def test_all_is_well_with_a_live_relay(rows: Rows, connection: psycopg.Connection) -> None:
    rows.node(in_flight=7, published_total=40)
    rows.node("relay-0", age=3600, in_flight=9, published_total=2)
    rows.pending()

    status = read(connection)

    assert (status.state, status.reasons) == (OutboxState.OK, [])
    assert (status.pending, status.in_flight, status.parked, status.published_total) == (1, 7, 0, 42)
    assert status.oldest_pending_age_s is not None
    assert [(node.name, node.alive, len(node.lanes)) for node in status.nodes] == [
        ("relay-0", False, 16),
        ("relay-1", True, 16),
    ]


def test_rows_that_wait_for_relays_which_cannot_deliver_are_stalled_at_once(
    rows: Rows, connection: psycopg.Connection
) -> None:
    rows.node(can_deliver=False, state="degraded", reasons=["broker: it blocks publishers (memory)"])
    rows.pending(created_at=ago(2))

    status = read(connection)

    assert status.state is OutboxState.STALLED
    assert status.reasons[-1] == "relay relay-1: broker: it blocks publishers (memory)"


def test_a_reason_that_relays_share_is_told_once(rows: Rows, connection: psycopg.Connection) -> None:
    for number in range(16):
        rows.node(f"relay-{number:02}", state="degraded", reasons=["broker: it blocks publishers (memory)"], lanes=[])
    rows.node("other", state="degraded", reasons=["database: slow"], lanes=[])

    assert sorted(read(connection).reasons) == [
        "16 relays: broker: it blocks publishers (memory)",
        "relay other: database: slow",
    ]


def test_a_killed_relay_is_a_reason_and_one_that_was_stopped_is_not(rows: Rows, connection: psycopg.Connection) -> None:
    rows.node("alive")
    rows.node("killed", age=60)
    rows.node("stopped", age=60, lanes=[])
    rows.node("killed-long-ago", age=7200)
    rows.node("now", age=3)
    rows.connection.execute("SELECT pg_advisory_unlock(hashtext('outbox.node'), hashtext('now'))")

    status = read(connection)

    assert (status.state, status.reasons) == (
        OutboxState.DEGRADED,
        ["relays killed, now have ended without handing the lanes over, and others took them: see what ended it"],
    )


def test_routes_that_do_not_work_are_named_with_what_waits_for_them(rows: Rows, connection: psycopg.Connection) -> None:
    connection.execute("SET timezone = 'UTC'")
    rows.node()
    for key in ("1", "2"):
        rows.quarantined("invoices", key)
    for number in range(11):
        rows.quarantined(f"other-{number}", exchange=f"exchange-{number}")

    status = read(connection)

    assert (status.state, status.pending, status.quarantined) == (OutboxState.DEGRADED, 0, 13)
    assert [(route.routing_key, route.rows) for route in status.quarantined_routes[:2]] == [
        ("invoices", 2),
        ("other-0", 1),
    ]
    assert status.reasons[0] == (
        "exchange '', routing key 'invoices' does not work since 2026-01-01 00:00:00 UTC, 2 rows wait: 312 NO_ROUTE;"
        " see `relay quarantine show 1`"
    )
    assert status.reasons[-1] == "2 more routes do not work"


def test_many_routes_of_an_exchange_are_one_reason(rows: Rows, connection: psycopg.Connection) -> None:
    connection.execute("SET timezone = 'UTC'")
    rows.node()
    rows.quarantined("invoices", exchange="billing")
    for number in range(12):
        rows.quarantined(f"order.{number}", str(number), exchange="orders")

    billing, orders = sorted(read(connection).reasons)

    assert billing.startswith("exchange 'billing', routing key 'invoices' does not work since ")
    assert orders == (
        "exchange 'orders': 12 routing keys do not work, 12 rows wait; the first is 'order.0',"
        " since 2026-01-01 00:00:00 UTC: 312 NO_ROUTE; see `relay quarantine list`"
    )


def test_an_empty_outbox_without_a_relay_is_degraded(connection: psycopg.Connection) -> None:
    status = read(connection)

    assert (status.state, status.pending, status.oldest_pending_age_s) == (OutboxState.DEGRADED, 0, None)
    assert status.reasons == ["no relay is alive: start `relay run`"]


@pytest.mark.parametrize(("age", "state"), [(-60, OutboxState.DEGRADED), (2, OutboxState.STALLED)])
def test_rows_that_age_without_a_live_relay_are_stalled(
    age: int, state: OutboxState, rows: Rows, connection: psycopg.Connection
) -> None:
    rows.node(age=30)
    rows.pending(created_at=ago(age))

    assert read(connection).state is state


def test_old_rows_and_a_live_relay_that_sends_nothing_are_stalled(rows: Rows, connection: psycopg.Connection) -> None:
    rows.node(state="degraded", reasons=["broker: no connection"])
    rows.pending(created_at=ago(60))

    status = read(connection)

    assert status.state is OutboxState.STALLED
    stalled, broker = status.reasons
    assert re.fullmatch(r"nothing goes out, and the oldest pending row has waited 6[0-3] s", stalled)
    assert broker == "relay relay-1: broker: no connection"


def test_old_rows_that_are_being_worked_off_are_not_stalled(rows: Rows, tables: Tables, database_url: str) -> None:
    rows.node(published_total=1)
    rows.pending(created_at=ago(60))
    stop = threading.Event()

    def publish() -> None:
        with psycopg.connect(database_url, autocommit=True) as other:
            while not stop.wait(0.02):
                other.execute("UPDATE outbox.node SET published_total = published_total + 1")

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        status = read_status(tables, progress_timeout=20)
    finally:
        stop.set()
        publishing.join()

    assert (status.state, status.reasons) == (OutboxState.OK, [])


def test_with_an_earlier_status_nothing_is_watched(rows: Rows, tables: Tables) -> None:
    rows.node(published_total=5)
    rows.pending(created_at=ago(60))

    worked_off = read_status(tables, progress_timeout=3600, published_before={"relay-1": 4})
    stalled = read_status(tables, progress_timeout=3600, published_before={"relay-1": 5})

    assert (worked_off.state, stalled.state) == (OutboxState.OK, OutboxState.STALLED)
    assert stalled.reasons[0].about is About.RELAYS


def test_rows_behind_a_refused_one_are_degraded_until_its_attempt_is_overdue(
    rows: Rows, connection: psycopg.Connection
) -> None:
    rows.node()
    refused = rows.pending(created_at=ago(60), attempts=3, available_at=ago(-30))
    rows.pending(created_at=ago(60))

    waiting = read(connection)
    rows.connection.execute("UPDATE outbox.message SET available_at = %s WHERE id = %s", [ago(30), refused])
    overdue = read(connection)

    assert (waiting.state, waiting.reasons) == (OutboxState.DEGRADED, ["1 refused by the broker, to be tried again"])
    assert overdue.state is OutboxState.STALLED


def test_a_row_for_later_does_not_age(rows: Rows, connection: psycopg.Connection) -> None:
    rows.node()
    rows.pending(created_at=ago(7 * 86400), available_at=ago(-3600))

    later = read(connection)
    rows.pending(created_at=ago(7 * 86400), available_at=ago(5))
    due = read(connection)

    assert (later.state, later.oldest_pending_age_s) == (OutboxState.OK, None)
    assert due.oldest_pending_age_s == pytest.approx(5, abs=4)


def test_the_oldest_row_is_found_in_any_lane_behind_rows_for_later(rows: Rows, connection: psycopg.Connection) -> None:
    rows.node()
    for number in range(40):
        rows.pending(str(number), available_at=ago(-3600))
        rows.pending(str(number), created_at=ago(3000 if number == 23 else 1))

    assert read(connection).oldest_pending_age_s == pytest.approx(3000, abs=100)


def test_parked_rows_degrade_and_are_counted_apart_from_those_held_behind(
    rows: Rows, connection: psycopg.Connection
) -> None:
    rows.node()
    head = rows.parked()
    rows.parked(behind=head)

    status = read(connection)

    assert (status.state, status.parked, status.parked_held) == (OutboxState.DEGRADED, 2, 1)
    assert status.reasons == ["1 parked, 1 held behind it: see `relay parked list`"]


def test_lanes_that_nobody_holds_are_named_while_rows_wait(rows: Rows, connection: psycopg.Connection) -> None:
    rows.node(lanes=[lane for lane in range(16) if lane not in (3, 4)])
    rows.pending()

    assert read(connection).reasons == ["no relay holds lanes 3, 4"]


TAKE_LANES = "SELECT pg_advisory_lock(hashtext('outbox.lane'), lane) FROM unnest(%s::int[]) AS lane"


@pytest.mark.every_postgres
@pytest.mark.parametrize("pending", [0, 1])
def test_the_session_that_has_a_lane_is_named_whether_or_not_rows_wait(
    rows: Rows, connection: psycopg.Connection, database_url: str, pending: int
) -> None:
    rows.node(lanes=[lane for lane in range(16) if lane not in (3, 4, 9)])
    for _ in range(pending):
        rows.pending()
    with psycopg.connect(database_url, application_name="report") as frozen, psycopg.connect(database_url) as other:
        frozen.execute(TAKE_LANES, [[3, 4]])
        other.execute(TAKE_LANES, [[9]])
        found = read(connection).reasons
        pids = frozen.info.backend_pid, other.info.backend_pid
        role = frozen.info.user

    remedies = [f"`SELECT pg_terminate_backend({pid})` ends it" for pid in pids]
    assert [*found[:2]] == [
        f"no relay holds lanes 3, 4: session {pids[0]} of role {role}, 'report', has their locks; {remedies[0]}",
        f"no relay holds lane 9: session {pids[1]} of role {role} has its lock; {remedies[1]}",
    ]
    assert [reason.runbook for reason in found[:2]] == [Runbook.LANE_LOST, Runbook.LANE_LOST]


def test_a_lane_that_a_live_relay_has_just_taken_is_no_reason_while_nothing_waits(
    rows: Rows, connection: psycopg.Connection
) -> None:
    rows.node("relay-7", lanes=[lane for lane in range(16) if lane != 3])
    rows.connection.execute(TAKE_LANES, [[3]])

    assert read(connection).reasons == []


@pytest.mark.every_postgres
def test_the_oldest_row_is_found_by_index_whatever_the_statistics_say(
    rows: Rows, connection: psycopg.Connection
) -> None:
    connection.execute("ANALYZE outbox.message_pending")
    rows.connection.execute(
        "INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)"
        " SELECT 'invoice', number::text, 'InvoiceIssued', '{}' FROM generate_series(1, 20000) AS number"
    )
    statement = OLDEST_PENDING.format(schema=sql.Identifier("outbox"), lanes=LANES)

    with connection.transaction():
        connection.execute(BY_INDEX)
        plan = "\n".join(row[0] for row in connection.execute(sql.SQL("EXPLAIN ") + statement))

    assert "Seq Scan" not in plan
    assert "Sort" not in plan
    assert "message_pending_lane_id" in plan


def test_health_is_that_of_the_named_relay(rows: Rows, connection: psycopg.Connection, tables: Tables) -> None:
    rows.node("fine")
    rows.node("slow", state="degraded", reasons=["broker: no connection"])
    rows.node("dead", age=11)
    rows.parked()

    check_health(tables, "fine", ready=True)
    check_health(tables, "slow", ready=False)
    with pytest.raises(NotReadyError, match="relay slow is degraded: broker: no connection"):
        check_health(tables, "slow", ready=True)
    with pytest.raises(NotReadyError, match=r"the last heartbeat of relay dead is 1[1-4] s old"):
        check_health(tables, "dead", ready=False)
    with pytest.raises(NotReadyError, match="no relay named none has ever written a heartbeat"):
        check_health(tables, "none", ready=False)


def test_a_session_refuses_tables_that_are_missing_or_behind_and_serves_newer_ones(
    rows: Rows, database: DatabaseSettings
) -> None:
    def open_session(found: str | None) -> None:
        rows.connection.execute("DELETE FROM outbox.migration")
        if found:
            rows.connection.execute("INSERT INTO outbox.migration VALUES (%s)", [found])
        with session(database):
            pass

    open_session("9999")
    with pytest.raises(SchemaError, match="are of version 0000, and this release needs"):
        open_session("0000")
    with pytest.raises(SchemaError, match="are of version none, and this release needs"):
        open_session(None)
    with (
        pytest.raises(SchemaError, match="has no outbox tables in schema elsewhere: run `relay migrate`"),
        session(DatabaseSettings(url=database.url, schema_name="elsewhere")),
    ):
        pass


def test_a_session_names_the_right_that_is_missing(
    rows: Rows, database: DatabaseSettings, postgres: PostgresServer, database_url: str
) -> None:
    role = f"reader_{postgres.port}_{database_url[-12:]}"
    rows.connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'pw'").format(sql.Identifier(role)))
    try:
        url = postgres.url(database_url.rpartition("/")[2], user=role, password="pw")
        refused = pytest.raises(AccessError, match=f"permission denied for schema outbox: grant it to role {role}")
        with refused, session(DatabaseSettings.model_validate({"url": url})):
            pass
    finally:
        rows.connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_a_session_bounds_its_statements(database: DatabaseSettings) -> None:
    late = pytest.raises(DeadlineError, match=r"PostgreSQL: no answer within 0\.05 s")

    with late, session(database, timeout=0.05) as tables:
        tables.connection.execute("SELECT pg_sleep(30)")


def test_a_session_tells_a_lost_connection(database: DatabaseSettings) -> None:
    lost = pytest.raises(DatabaseUnavailableError, match="the connection was lost: terminating connection")

    with lost, session(database) as tables:
        tables.connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def test_a_server_that_is_read_only_is_named_as_such(rows: Rows, database: DatabaseSettings) -> None:
    refused = pytest.raises(
        AccessError, match="takes no writes by this login: `relay doctor` names what sets default_tr"
    )

    with refused, session(database) as tables:
        tables.connection.execute("SET default_transaction_read_only = on")
        tables.connection.execute("UPDATE outbox.node SET state = 'ok'")


def test_rows_of_a_paused_lane_do_not_age_and_the_lane_is_not_lost(
    rows: Rows, connection: psycopg.Connection, tables: Tables
) -> None:
    old = rows.pending(created_at=ago(60))
    (lane,) = rows.connection.execute("SELECT lane FROM outbox.message WHERE id = %s", [old]).fetchone() or (0,)
    rows.node(lanes=[each for each in range(LANES) if each != lane])
    before = read(connection)

    pause_lane(tables, lane, by="ada", why="test")
    paused = read(connection)
    rows.pending(created_at=ago(60), available_at=ago(30))
    due = read(connection)

    assert f"no relay holds lane {lane}" in before.reasons
    assert before.state == OutboxState.STALLED
    assert (paused.state, paused.oldest_pending_age_s, paused.pending) == (OutboxState.DEGRADED, None, 1)
    assert [reason.about for reason in paused.reasons] == [About.PAUSE]
    assert paused.reasons[0].startswith(f"lane {lane} is paused by ada since ")
    assert (due.pending, due.oldest_pending_age_s) == (2, None)
