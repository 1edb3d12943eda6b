"""`message_count`, `message_state` and `sent`: what they answer, to whom, and which parts of the table they read."""

from datetime import UTC, datetime, timedelta
from typing import LiteralString

import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.schema.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.support.days import make_days
from tests.support.plans import Plan, explain, nodes, scans, tables
from tests.support.roles import allowed

pytestmark = pytest.mark.every_postgres

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
DAYS = 10
STATES = ("pending", "sent", "parked", "quarantined", "discarded", "archived")
ONE_IN_EACH = """
    INSERT INTO outbox.message (message_id, aggregate_type, aggregate_id, event_type, payload, state, sent_at,
        quarantine)
    SELECT gen_random_uuid(), 'a', state, 'e', '1', state, CASE state WHEN 'sent' THEN now() END,
        CASE state WHEN 'quarantined' THEN 7 END
    FROM unnest(%s::text[]) AS state
"""
ROWS = 20_000  # in the backlog
PAYLOAD = 600  # bytes, as an invoice has
BACKLOG = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'invoice', n::text, 'InvoiceIssued', to_json(repeat('x', %s)) FROM generate_series(1, %s) AS n
"""
PARKED = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, parked_at)
    SELECT 'invoice', n::text, 'InvoiceIssued', to_json(repeat('x', %s)), 'parked', now()
    FROM generate_series(1, %s) AS n
"""
SENT = """
    INSERT INTO outbox.message (aggregate_type, event_type, payload, state, sent_at)
    SELECT 'a', 'e', '1', 'sent', %s + n * interval '1 hour' FROM generate_series(0, 24 * %s - 1) AS n
"""


@pytest.fixture
def full(connection: Connection) -> Connection:
    """A backlog, as many parked rows, and ten days of sent ones; vacuumed, as a backlog is after a while."""
    connection.execute(make_days("%s", "%s"), [TODAY - timedelta(days=DAYS), DAYS])
    connection.execute(BACKLOG, [PAYLOAD, ROWS])
    connection.execute(PARKED, [PAYLOAD, ROWS])
    connection.execute(SENT, [TODAY - timedelta(days=DAYS), DAYS])
    connection.execute("VACUUM ANALYZE outbox.message")
    return connection


def test_each_row_has_its_state(connection: Connection) -> None:
    connection.execute(ONE_IN_EACH, [list(STATES)])

    counts = connection.execute("SELECT state, messages FROM outbox.message_count").fetchall()
    states = connection.execute("SELECT aggregate_id, state, sent_at IS NOT NULL FROM outbox.message_state").fetchall()

    assert sorted(counts) == sorted((state, 1) for state in STATES)
    assert sorted(states) == sorted((state, state, state == "sent") for state in STATES)


def test_a_state_without_messages_is_counted_as_zero(connection: Connection) -> None:
    counts = connection.execute("SELECT state, messages FROM outbox.message_count").fetchall()
    parked = connection.execute("SELECT messages FROM outbox.message_count WHERE state = 'parked'").fetchall()

    assert sorted(counts) == sorted((state, 0) for state in STATES)
    assert parked == [(0,)]


def test_the_view_has_the_columns_of_the_table(connection: Connection) -> None:
    columns = """
        SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
        WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
    """

    of_table, of_view = (
        connection.execute(columns, [name]).fetchall() for name in ("outbox.message", "outbox.message_state")
    )

    assert of_view == of_table


def test_sent_returns_what_was_sent_from_since_until_just_before_until(connection: Connection) -> None:
    connection.execute(make_days("%s", "2"), [TODAY - timedelta(days=1)])
    connection.execute(ONE_IN_EACH, [["pending", "parked"]])
    connection.execute(SENT, [TODAY - timedelta(days=1), 1])
    ask = "SELECT sent_at FROM outbox.sent(%s, %s) ORDER BY sent_at"
    first, second, third = (TODAY - timedelta(hours=hours) for hours in (4, 3, 2))

    assert connection.execute(ask, [first, third]).fetchall() == [(first,), (second,)]
    assert connection.execute(ask, [first, first]).fetchall() == []
    assert len(connection.execute(ask, ["-infinity", "infinity"]).fetchall()) == 24


def test_a_migration_back_and_forth_keeps_rows_and_surfaces(database: DatabaseSettings, connection: Connection) -> None:
    connection.execute(ONE_IN_EACH, [list(STATES)])
    before = description(url_of(database))

    downgrade(database, "0012")
    without = description(url_of(database))
    migrate(database)

    assert [line for line in before if line.startswith("v ")] != []
    assert [line for line in without if line.startswith("v ") or "FUNCTION outbox.sent(" in line] == []
    assert description(url_of(database)) == before
    assert connection.execute("SELECT sum(messages) FROM outbox.message_count").fetchone() == (6,)


def test_the_right_on_a_surface_is_enough_and_gives_nothing_beneath_it(connection: Connection) -> None:
    connection.execute(ONE_IN_EACH, [list(STATES)])
    connection.execute("""
        CREATE ROLE dashboard;
        CREATE ROLE reports;
        GRANT USAGE ON SCHEMA outbox TO dashboard, reports;
        GRANT SELECT ON outbox.message_count TO dashboard;
        GRANT SELECT (id, state, sent_at) ON outbox.message_state TO dashboard;
        GRANT SELECT ON outbox.message_state TO reports;
    """)
    statements: list[LiteralString] = [
        "SELECT state, messages FROM outbox.message_count",
        "SELECT id, state, sent_at FROM outbox.message_state",
        "SELECT payload FROM outbox.message_state",
        "SELECT id FROM outbox.sent('-infinity', 'infinity')",
        "SELECT id FROM outbox.message",
        "SELECT count(*) FROM outbox.message_pending",
        "UPDATE outbox.message_state SET state = 'sent', sent_at = now()",
        "DELETE FROM outbox.message_state",
        "INSERT INTO outbox.message_state (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')",
    ]
    try:
        assert allowed(connection, "dashboard", statements) == statements[:2]
        assert allowed(connection, "reports", statements) == statements[1:4]
    finally:
        connection.execute("DROP OWNED BY dashboard, reports; DROP ROLE dashboard, reports")


def test_counting_by_the_index_reads_a_tenth_of_the_pages_that_the_table_needs(full: Connection) -> None:
    waiting = explain(full, "SELECT state, messages FROM outbox.message_count WHERE state IN ('pending', 'parked')")
    surface = explain(full, "SELECT state, messages FROM outbox.message_count")
    table = explain(full, "SELECT state, count(*) FROM outbox.message GROUP BY state")

    assert {(scan["Relation Name"], scan["Node Type"]) for scan in scans(waiting)} == {
        ("message_pending", "Index Only Scan"),
        ("message_parked", "Index Only Scan"),
    }
    assert pages(surface) < pages(table) / 10


def test_only_the_state_that_is_asked_for_is_counted(full: Connection) -> None:
    plan = explain(full, "SELECT messages FROM outbox.message_count WHERE state = 'quarantined'")

    assert tables(plan) == {"message_quarantined"}


@pytest.mark.parametrize(
    ("condition", "index"),
    [
        ("state = 'pending' AND lane = 3 AND id = 4711", "message_pending_lane_id"),
        ("state IN ('parked', 'discarded') AND id = 24711", "message_parked_id"),
        ("state = 'parked' AND aggregate_type = 'invoice' AND aggregate_id = '4711'", "message_parked_key"),
    ],
)
def test_a_message_is_found_by_the_index_of_its_state(full: Connection, condition: str, index: str) -> None:
    plan = explain(full, f"SELECT * FROM outbox.message_state WHERE {condition}")

    assert [node["Index Name"] for node in nodes(plan) if "Index Name" in node] == [index]
    assert tables(plan) <= {index[: index.index("_", 8)], "message_discarded"}


def test_the_days_are_left_out_of_a_search_among_what_waits(full: Connection) -> None:
    condition = "message_id = gen_random_uuid() AND state IN ('parked', 'quarantined')"

    plan = explain(full, f"SELECT * FROM outbox.message_state WHERE {condition}")

    assert tables(plan) == {"message_parked", "message_quarantined"}


@pytest.mark.parametrize("is_generic", [False, True], ids=["constants", "parameters"])
def test_sent_reads_only_the_days_of_its_times(full: Connection, is_generic: bool) -> None:
    since, until = TODAY - timedelta(days=4, hours=2), TODAY - timedelta(days=3)
    ask = f"SELECT id FROM outbox.sent('{since}', '{until}') WHERE event_type = 'e'"
    if is_generic:
        full.execute("SET plan_cache_mode = force_generic_plan")
        full.execute("PREPARE ask (timestamptz, timestamptz) AS SELECT id FROM outbox.sent($1, $2)")
        ask = f"EXECUTE ask ('{since}', '{until}')"

    plan = explain(full, ask)

    read = {TODAY - timedelta(days=ago) for ago in (5, 4)}
    assert tables(plan) == {f"message_sent_{day:%Y%m%d}" for day in read}
    assert plan["Actual Rows"] == 26


def pages(plan: Plan) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
