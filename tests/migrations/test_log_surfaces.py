"""0016: the surfaces over the log: what they answer, by which plans, and with how much work."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.migrate import downgrade, migrate
from relay.operate.status import BY_ORDER, OLDEST_PENDING
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.support.log import IDS, mark, note_checkpoint, use_log
from tests.support.plans import Plan, explain, nodes, scans, tables

pytestmark = pytest.mark.every_postgres

INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'invoice', n::text, 'InvoiceIssued', '1' FROM generate_series(1, %s) AS n
"""
COUNTS = "SELECT state, messages FROM outbox.message_count WHERE state IN ('pending', 'sent') ORDER BY state"
STATES = "SELECT state, count(*) FROM outbox.message_state GROUP BY 1 ORDER BY 1"
SENT = "SELECT count(*), count(DISTINCT id) FROM outbox.sent(%s, %s)"
# By what the rows and receipts say themselves.
TRUTH = """
    SELECT state, count(*) FROM (
        SELECT CASE WHEN id IN (SELECT unnest(ids) FROM outbox.receipt) THEN 'sent' ELSE 'pending' END
        FROM outbox.message_log
    ) AS told (state) GROUP BY 1 ORDER BY 1
"""
NOW = datetime.now(UTC)
LONG_AGO, TOMORROW = NOW - timedelta(days=365), NOW + timedelta(days=1)
MANY = 100_000  # sent rows
BACKLOG = 20_000
LATE = 8_000  # rows in the ranges of the BRIN that may have some that came late


@pytest.fixture
def log(connection: Connection) -> Connection:
    connection.execute("SET statement_timeout = '60s'")
    use_log(connection)
    return connection


@pytest.fixture(params=["as written", "vacuumed"])
def full(request: pytest.FixtureRequest, connection: Connection) -> Connection:
    """Many sent rows, and a backlog behind them; the checkpoint is up to date."""
    use_log(connection, ids=1 << 24)
    for _ in range(10):
        connection.execute(INSERT, [MANY // 10])
        mark(connection)
    note_checkpoint(connection)
    connection.execute(INSERT, [BACKLOG])
    if request.param == "vacuumed":
        connection.execute("VACUUM ANALYZE outbox.message, outbox.receipt")
    return connection


@pytest.fixture
def is_vacuumed(request: pytest.FixtureRequest) -> bool:
    return "vacuumed" in request.node.name


def last_id(connection: Connection) -> int:
    (found,) = connection.execute("SELECT last_value FROM outbox.message_id_seq").fetchone() or (0,)
    assert isinstance(found, int)
    return found


def test_a_row_of_the_log_is_pending_until_a_receipt_names_it(log: Connection) -> None:
    log.execute(INSERT, [5])
    before = log.execute(STATES).fetchall(), log.execute(COUNTS).fetchall()
    mark(log, up_to=3)

    assert before == ([("pending", 5)], [("pending", 5), ("sent", 0)])
    assert log.execute(STATES).fetchall() == log.execute(COUNTS).fetchall() == [("pending", 2), ("sent", 3)]
    told = "SELECT id, state, sent_at < now() - interval '1 day', block FROM outbox.message_state ORDER BY id"
    assert log.execute(told).fetchall() == [
        (1, "sent", True, 0), (2, "sent", True, 0), (3, "sent", True, 0), (4, "pending", None, None),
        (5, "pending", None, None),
    ]  # fmt: skip
    assert log.execute(SENT, [LONG_AGO, TOMORROW]).fetchone() == (3, 3)


def test_the_surfaces_answer_by_checkpoints_as_without_one(log: Connection, other_connection: Connection) -> None:
    """One lane's checkpoint is behind the others, and a transaction that it could not see commits below it."""
    log.execute(INSERT, [300])
    with other_connection.transaction():
        other_connection.execute(INSERT, [20])
        log.execute(INSERT, [100])
        mark(log)
        note_checkpoint(log, last_id(log), list(range(15)))
        note_checkpoint(log, 50, [15])
    log.execute(INSERT, [30])

    for checkpoints in ("as they are", "none"):
        assert log.execute(COUNTS).fetchall() == log.execute(TRUTH).fetchall() == [("pending", 50), ("sent", 400)]
        assert log.execute(STATES).fetchall() == [("pending", 50), ("sent", 400)], checkpoints
        log.execute("DELETE FROM outbox.checkpoint")


def test_a_checkpoint_of_another_cluster_says_nothing(log: Connection) -> None:
    log.execute(INSERT, [3])
    note_checkpoint(log, 1000)
    log.execute("UPDATE outbox.checkpoint SET cluster = 1")

    assert log.execute(COUNTS).fetchall() == [("pending", 3), ("sent", 0)]


def test_both_storages_are_counted_and_shown_together(connection: Connection) -> None:
    connection.execute(INSERT, [4])
    connection.execute("UPDATE outbox.message SET state = 'sent', sent_at = now() WHERE id = 1")
    use_log(connection)
    connection.execute(INSERT, [5])
    mark(connection, up_to=6)

    assert connection.execute(COUNTS).fetchall() == [("pending", 6), ("sent", 3)]
    assert connection.execute(STATES).fetchall() == [("pending", 6), ("sent", 3)]
    assert connection.execute(SENT, [LONG_AGO, TOMORROW]).fetchone() == (3, 3)
    assert connection.execute(SENT, [NOW - timedelta(hours=1), TOMORROW]).fetchone() == (1, 1)


def test_a_row_that_has_left_the_log_has_the_state_that_it_went_to(log: Connection) -> None:
    log.execute(INSERT, [4])
    mark(log, up_to=1)
    log.execute("UPDATE outbox.message SET state = 'parked' WHERE id = 2")
    log.execute("UPDATE outbox.message SET state = 'pending' WHERE id = 3")
    log.execute("UPDATE outbox.message SET state = 'pending' WHERE id = 1")  # an operator wants it sent again

    assert log.execute("SELECT id, state FROM outbox.message_state ORDER BY id").fetchall() == [
        (1, "pending"), (2, "parked"), (3, "pending"), (4, "pending")
    ]  # fmt: skip


def test_nobody_changes_a_message_by_the_view(connection: Connection) -> None:
    for statement in (
        "UPDATE outbox.message_state SET state = 'sent'",
        "DELETE FROM outbox.message_state",
        "INSERT INTO outbox.message_state (aggregate_type, event_type, payload) VALUES ('a', 'e', '1')",
    ):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            connection.execute(statement.encode())


def test_the_way_back_keeps_who_may_read_the_surfaces(database: DatabaseSettings, connection: Connection) -> None:
    rights = "SELECT relname, relacl::text FROM pg_class WHERE relname IN ('message_count', 'message_state') ORDER BY 1"
    connection.execute("CREATE ROLE board; GRANT SELECT ON outbox.message_count, outbox.message_state TO board")
    try:
        before, objects = connection.execute(rights).fetchall(), description(url_of(database))
        downgrade(database, "0015")
        without = connection.execute(rights).fetchall()
        connection.execute(INSERT, [1])
        connection.execute("SELECT * FROM outbox.sent('-infinity', 'infinity')")
        migrate(database)

        assert connection.execute(rights).fetchall() == without == before
        assert description(url_of(database)) == objects
        may = "SELECT has_table_privilege('board', 'outbox.message_waits', 'SELECT')"
        assert connection.execute(may).fetchone() == (True,)
    finally:
        connection.execute("DROP OWNED BY board; DROP ROLE board")


def test_counting_what_waits_reads_few_rows_that_are_sent(full: Connection, is_vacuumed: bool) -> None:
    """Before the first vacuum, which comes after 100,000 rows, the BRIN leads to all of them."""
    plan = explain(full, "SELECT messages FROM outbox.message_count WHERE state = 'pending'")

    assert rows_read(plan) <= BACKLOG + (LATE if is_vacuumed else MANY + BACKLOG)
    assert plan["Actual Total Time"] < 1000
    assert full.execute(COUNTS).fetchall() == [("pending", BACKLOG), ("sent", MANY)]


def test_sent_messages_are_counted_by_their_receipts(full: Connection) -> None:
    plan = explain(full, "SELECT messages FROM outbox.message_count WHERE state = 'sent'")

    assert not any(name.startswith("message_log") for name in tables(plan))


def test_a_state_that_is_not_in_the_log_is_sought_without_it(full: Connection) -> None:
    for condition in (
        "state IN ('parked', 'discarded') AND id = 7",
        "state = 'pending' AND quarantine = 3",
        "state = 'pending' AND available_at IS NOT NULL AND attempts > 0",
    ):
        plan = explain(full, f"SELECT * FROM outbox.message_state WHERE {condition}")

        assert not any(name.startswith(("message_log", "receipt")) for name in tables(plan)), condition


def test_the_oldest_row_is_found_by_index_and_without_a_sort(full: Connection, is_vacuumed: bool) -> None:
    with full.transaction():
        full.execute(BY_ORDER)
        plan = explain(full, OLDEST_PENDING.format(schema=psycopg.sql.Identifier("outbox")))

    assert "Sort" not in {node["Node Type"] for node in nodes(plan)}
    assert rows_read(plan) <= 16 + (LATE if is_vacuumed else MANY + BACKLOG)


def test_the_sent_rows_of_a_time_are_read_by_the_blocks_of_their_receipts(full: Connection) -> None:
    full.execute(INSERT, [1000])
    mark(full, hours_ago=5)

    plan = explain(full, f"SELECT * FROM outbox.sent('{NOW - timedelta(hours=6)}', '{TOMORROW}')")

    assert plan["Actual Rows"] == BACKLOG + 1000
    assert rows_read(plan) <= BACKLOG + 1000 + 2 * IDS


@pytest.mark.parametrize("reader", ["count", "by id"])
def test_a_hundred_thousand_sent_rows_are_read_in_time(full: Connection, reader: str) -> None:
    ask = {
        "count": f"SELECT count(*) FROM outbox.sent('{LONG_AGO}', '{TOMORROW}')",
        "by id": "SELECT * FROM outbox.message_state WHERE state = 'sent' AND id = 4711",
    }

    plan = explain(full, ask[reader])

    assert plan["Actual Total Time"] < 5000


def rows_read(plan: Plan) -> int:
    """Return how many rows of the log were fetched."""
    return int(
        sum(
            (scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0) + scan.get("Rows Removed by Index Recheck", 0))
            * scan["Actual Loops"]
            for scan in scans(plan)
            if scan["Relation Name"].startswith("message_log_")
        )
    )
