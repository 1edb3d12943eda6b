"""0015: the log, its segments and receipts, while writers never stop."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, LiteralString

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.errors import SchemaError
from relay.operate.downgrade import preview
from relay.operate.migrate import downgrade, migrate
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.support.log import ENSURE, IDS, TO_THE_LOG, ensure, mark, use_log
from tests.support.process import wait_for

pytestmark = pytest.mark.every_postgres

INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'invoice', n::text, 'InvoiceIssued', '1' FROM generate_series(1, %s) AS n
"""
CUT = "SELECT outbox.cut_segment()"
EMPTY = "SELECT rows, kept_by FROM outbox.empty_segment(%s, %s, false)"
DROP = "SELECT outbox.drop_segment()"
OPEN_SEGMENTS = """
    SELECT number FROM outbox.segment
    WHERE emptied_at IS NULL AND past <= (SELECT last_value FROM outbox.message_id_seq) ORDER BY number
"""
PLACES = "SELECT tableoid::regclass::text, count(*) FROM outbox.message GROUP BY 1 ORDER BY 1"
# By what the rows and receipts say themselves.
COUNTS = """
    SELECT state, count(*) FROM (
        SELECT CASE WHEN EXISTS (SELECT FROM outbox.receipt WHERE block = row.id >> 12 AND row.id = ANY (ids))
            THEN 'sent' ELSE 'pending' END
        FROM outbox.message_log AS row
    ) AS told (state) GROUP BY 1 ORDER BY 1
"""
SEGMENTS = """
    SELECT number, count(inhrelid) FROM outbox.segment
    LEFT JOIN pg_inherits ON inhparent IN ('outbox.message_log'::regclass, 'outbox.receipt'::regclass)
        AND inhrelid IN (to_regclass('outbox.message_log_' || number), to_regclass('outbox.receipt_' || number))
    GROUP BY 1 ORDER BY 1
"""
NAMED = "INSERT INTO outbox.message (id, aggregate_type, event_type, payload) VALUES (%s, 'a', 'e', '1')"
SENT_DAY = "SELECT (now() AT TIME ZONE 'UTC' - interval '2 days')::date"
WAITS = """
    SELECT max(extract(epoch FROM clock_timestamp() - waitstart))::float8 FROM pg_locks
    WHERE NOT granted AND locktype = 'relation' AND mode = 'RowExclusiveLock'
"""


@pytest.fixture
def log(connection: Connection) -> Connection:
    """A table whose new rows go to the log, with a segment for them and two ahead; each wait has an end."""
    connection.execute("SET statement_timeout = '60s'")
    use_log(connection)
    return connection


def empty(connection: Connection, number: object, *, archived: bool = False) -> tuple[object, ...] | None:
    return connection.execute(EMPTY, [number, archived]).fetchone()


def drop(connection: Connection) -> object:
    """Drop the lowest segment; return its number, or `None`."""
    (number,) = connection.execute(DROP).fetchone() or (None,)
    return number


def archive(connection: Connection, rows: int) -> None:
    """Note that the day of the receipts was archived with so many rows."""
    day = (
        "INSERT INTO outbox.archived_day (day, rows, checksum, path) SELECT day, %s, 0, 'archive' FROM ("
        + SENT_DAY
        + ") AS sent (day)"
    )
    connection.execute(day, [rows])


def settled(connection: Connection, rows: int) -> None:
    """Write so many rows, cut their segment, and mark them."""
    connection.execute(INSERT, [rows])
    connection.execute(CUT)
    mark(connection)


def test_rows_go_to_pending_until_the_default_is_another(connection: Connection) -> None:
    ensure(connection)
    connection.execute(INSERT, [2])
    connection.execute(TO_THE_LOG)
    connection.execute(INSERT, [3])
    connection.execute("ALTER TABLE ONLY outbox.message ALTER COLUMN state SET DEFAULT 'pending'")
    connection.execute(INSERT, [4])

    assert connection.execute(PLACES).fetchall() == [("outbox.message_log_1", 3), ("outbox.message_pending", 6)]


def test_a_migration_back_and_forth_keeps_every_row_and_sends_the_log_to_its_days(
    database: DatabaseSettings, log: Connection
) -> None:
    log.execute(INSERT, [5])
    mark(log)
    ids = "SELECT id, message_id, lane, payload::text, created_at FROM outbox.message ORDER BY id"
    before, rows = description(url_of(database)), log.execute(ids).fetchall()

    downgrade(database, "0014")
    states = "SELECT state, sent_at < now() - interval '1 day', count(*) FROM outbox.message GROUP BY 1, 2"
    assert log.execute(states).fetchall() == [("sent", True, 5)]
    assert log.execute(ids).fetchall() == rows
    log.execute(INSERT, [1])
    migrate(database)
    ensure(log, 2)

    after = description(url_of(database))
    states = "SELECT state, count(*) FROM outbox.message GROUP BY 1 ORDER BY 1"
    assert log.execute(states).fetchall() == [("pending", 1), ("sent", 5)]
    days = "message_sent_"
    assert [line for line in after if days not in line] == [
        line.replace("'written'::text", "'pending'::text") if line.startswith("message.state ") else line
        for line in before
        if days not in line
    ]


def test_there_is_no_way_back_while_a_row_of_the_log_is_not_sent(database: DatabaseSettings, log: Connection) -> None:
    log.execute(INSERT, [5])
    mark(log)
    log.execute(INSERT, [1])

    with pytest.raises(SchemaError, match="1 messages of the log are not sent"):
        downgrade(database, "0014")
    cost = {state: rows for table, state, rows in preview(database, "base").rows if table == "message"}

    assert log.execute(COUNTS).fetchall() == [("pending", 1), ("sent", 5)]
    assert cost["written"] == 6


def test_a_mark_of_today_leaves_no_transaction_id_in_the_day(connection: Connection) -> None:
    connection.execute(INSERT, [1])
    connection.execute("""
        WITH done AS (DELETE FROM outbox.message_pending RETURNING id, aggregate_type, event_type, payload)
        INSERT INTO outbox.message_sent (id, aggregate_type, event_type, payload, state, sent_at)
        SELECT *, 'sent', now() FROM done
    """)

    assert connection.execute("SELECT xid FROM outbox.message").fetchall() == [(None,)]


def test_ids_jump_to_the_next_segment_when_one_is_cut(log: Connection) -> None:
    log.execute(INSERT, [10])

    cut = log.execute(CUT).fetchone()
    log.execute(INSERT, [10])

    assert cut == (1,)
    assert log.execute(PLACES).fetchall() == [("outbox.message_log_1", 10), ("outbox.message_log_2", 10)]
    assert log.execute("SELECT min(id) FROM outbox.message_log_2").fetchone() == (IDS + 1,)


def test_the_last_segment_is_not_cut(log: Connection) -> None:
    for number in (1, 2):
        assert log.execute(CUT).fetchone() == (number,)

    assert log.execute(CUT).fetchone() == (None,)


def test_a_segment_is_emptied_when_every_row_has_a_receipt(log: Connection) -> None:
    log.execute(INSERT, [10])
    log.execute(CUT)
    mark(log)

    assert empty(log, 1) == (10, None)
    assert log.execute("SELECT rows, sent, emptied_at <= now() FROM outbox.segment WHERE number = 1").fetchone() == (
        10, 10, True,
    )  # fmt: skip
    assert log.execute("SELECT count(*) FROM outbox.message_log_1").fetchone() == (0,)
    assert log.execute("SELECT count(*) FROM outbox.receipt_1").fetchone() == (0,)


def test_a_row_without_a_receipt_keeps_its_segment(log: Connection) -> None:
    log.execute(INSERT, [9])
    mark(log)
    log.execute(INSERT, [1])
    log.execute(CUT)

    assert empty(log, 1) == (10, "1 of its rows have no receipt: the relay has not sent them")
    assert log.execute("SELECT count(*) FROM outbox.message_log_1").fetchone() == (10,)


def test_rows_that_were_sent_today_keep_their_segment(log: Connection) -> None:
    log.execute(INSERT, [1])
    log.execute(CUT)
    log.execute("INSERT INTO outbox.receipt (block, n, ids) VALUES (0, 1, '{1}')")

    assert empty(log, 1) == (1, "some of its rows were sent today")


def test_a_replay_that_needs_its_rows_keeps_a_segment(log: Connection) -> None:
    log.execute(INSERT, [1])
    log.execute(CUT)
    mark(log)
    log.execute("INSERT INTO outbox.replay (made_by, filter) VALUES ('me', '{}')")

    (_, kept_by) = empty(log, 1) or (0, "")

    assert ": replay 1 needs it" in str(kept_by)


@pytest.mark.parametrize("number", [1, 2, 4711], ids=["in use", "ahead", "not there"])
def test_a_segment_whose_ids_are_still_given_is_refused(log: Connection, number: int) -> None:
    with pytest.raises((psycopg.errors.InvalidParameterValue, psycopg.errors.UndefinedTable)):
        empty(log, number)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_snapshot_from_before_empties_no_segment(log: Connection, level: LiteralString) -> None:
    log.execute(INSERT, [1])
    log.execute(CUT)
    mark(log)

    log.execute("SET default_transaction_isolation = '" + level + "'")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="READ COMMITTED"):
        empty(log, 1)


def test_a_late_writer_keeps_its_segment_whatever_the_moment(log: Connection, other_connection: Connection) -> None:
    """It has an id of the segment; it inserts before the segment is emptied, or after, and its row is there."""
    log.execute(INSERT, [1])
    late = [number for (number,) in log.execute("SELECT nextval('outbox.message_id_seq') FROM generate_series(1, 2)")]
    log.execute(CUT)
    mark(log)
    with other_connection.transaction():
        other_connection.execute(NAMED, [late[0]])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            empty(log, 1)
    assert empty(log, 1) == (2, "1 of its rows have no receipt: the relay has not sent them")
    mark(log)
    assert empty(log, 1) == (2, None)
    other_connection.execute(NAMED, [late[1]])

    assert log.execute(COUNTS).fetchall() == [("pending", 1)]
    assert log.execute("SELECT id FROM outbox.message_log").fetchall() == [(late[1],)]


def test_a_row_that_commits_between_the_two_looks_keeps_its_segment(
    log: Connection, other_connection: Connection
) -> None:
    """The second look under the lock finds it: by then the first one has counted, and waits."""
    log.execute(INSERT, [1])
    late = log.execute("SELECT nextval('outbox.message_id_seq')").fetchone()
    log.execute(CUT)
    mark(log)
    log.execute("SET lock_timeout = 0")
    log.execute("ALTER FUNCTION outbox.empty_segment(bigint, boolean, boolean) SET lock_timeout = '20s'")
    with ThreadPoolExecutor(1) as thread:
        with other_connection.transaction():
            other_connection.execute(NAMED, late)
            emptying = thread.submit(empty, log, 1)
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outbox.message_log_1'::regclass"
            wait_for(lambda: other_connection.execute(waiting).fetchone() == (1,), "it waits for the writer", 20)
        kept = emptying.result(20)

    assert kept == (2, "its rows have changed since they were counted")
    assert log.execute("SELECT count(*) FROM outbox.message_log_1").fetchone() == (2,)


def test_no_segment_is_attached_under_a_statement_that_may_come_to_its_ids(
    log: Connection, other_connection: Connection
) -> None:
    """It knows the partitions of its beginning. It sends those rows to `far`, which would refuse them."""
    log.execute("SELECT pg_advisory_lock(7)")
    slow = """
        INSERT INTO outbox.message (aggregate_type, event_type, payload)
        SELECT 'a', 'e' || CASE n WHEN 100 THEN pg_advisory_xact_lock(7)::text ELSE '' END, '1'
        FROM generate_series(1, %s) AS n
    """
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(other_connection.execute, slow, [4 * IDS])
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
        wait_for(lambda: log.execute(waiting).fetchone() == (1,), "the statement is under way", 20)
        steps = ensure(log, 5, tries=3)
        log.execute("SELECT pg_advisory_unlock(7)")
        writing.result(60)

    assert steps == []
    assert log.execute("SELECT count(*) FROM outbox.message").fetchone() == (4 * IDS,)


def test_without_a_relay_the_far_segment_takes_all_rows_and_is_one_of_many_later(log: Connection) -> None:
    log.execute(INSERT, [4 * IDS])
    in_far = "SELECT count(*) FROM outbox.message_log_far"
    assert log.execute(in_far).fetchone() == (IDS + 1,)
    mark(log)

    steps = ensure(log, 2)
    assert log.execute(CUT).fetchone() == (4,)
    log.execute(INSERT, [10])

    assert steps == ["bounded", "read", "changed", "made", "made"]
    assert log.execute(in_far).fetchone() == (0,)
    assert log.execute(COUNTS).fetchall() == [("pending", 10), ("sent", 4 * IDS)]
    assert [empty(log, number) for number in (1, 2, 3, 4)] == [
        (IDS - 1, None), (IDS, None), (IDS, None), (IDS + 1, None)
    ]  # fmt: skip
    assert log.execute(PLACES).fetchall() == [("outbox.message_log_5", 10)]


@pytest.mark.parametrize("named", [1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("is_sent", [False, True], ids=["pending", "sent"])
@pytest.mark.parametrize("rows", [10, 4 * IDS], ids=["far is not in use", "far is in use"])
def test_an_id_that_its_writer_named_far_ahead_keeps_no_segment_from_being_made(
    log: Connection, named: int, is_sent: bool, rows: int
) -> None:
    """Its row goes where rows are that are no part of the log, and `far` ends not far behind the sequence."""
    log.execute(INSERT, [rows])
    log.execute(NAMED, [named])
    if is_sent:
        mark(log)

    steps = ensure(log, 5)
    log.execute(INSERT, [1])

    assert steps[-1] == "made"
    assert log.execute("SELECT count(*) FROM outbox.message_log_far").fetchone() == (0,)
    assert log.execute("SELECT count(*) FROM outbox.receipt_far").fetchone() == (0,)
    found = log.execute("SELECT state, sent_at < now() - interval '1 day' FROM outbox.message WHERE id = %s", [named])
    assert found.fetchall() == [("sent", True) if is_sent else ("pending", None)]
    assert log.execute("SELECT count(*) FROM outbox.message_log").fetchone() == (rows + 1,)
    assert log.execute("SELECT max(past) < (1::bigint << 40) FROM outbox.segment").fetchone() == (True,)


def test_a_receipt_without_a_row_keeps_no_segment_from_being_made(log: Connection) -> None:
    """An operator has deleted the rows that were in `far`."""
    log.execute(INSERT, [4 * IDS])
    mark(log)
    log.execute("DELETE FROM outbox.message WHERE state = 'written'")

    steps = ensure(log, 2)

    assert steps[-1] == "made"
    assert log.execute("SELECT count(*) FROM outbox.receipt_far").fetchone() == (0,)


def test_a_row_of_the_log_names_its_transaction(log: Connection) -> None:
    with pytest.raises(psycopg.errors.NotNullViolation):
        log.execute(
            "INSERT INTO outbox.message (aggregate_type, event_type, payload, xid) VALUES ('a', 'e', '1', NULL)"
        )


def test_the_far_segment_becomes_one_without_being_read_under_a_lock(log: Connection) -> None:
    log.execute(INSERT, [4 * IDS])
    told: list[str] = []
    log.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
    log.execute("SET client_min_messages = debug1")

    for _ in range(3):
        log.execute(ENSURE, [2, IDS])

    assert 'partition constraint for table "message_log_4" is implied by existing constraints' in told


@pytest.mark.parametrize(
    ("noted", "kept_by"),
    [
        (None, "it is not archived"),
        (2, "it has 3 rows and 2 are archived"),
        (4, "it has 3 rows and 4 are archived"),
        (3, None),
    ],
)
def test_a_segment_waits_for_the_archive_of_its_days(log: Connection, noted: int | None, kept_by: str | None) -> None:
    settled(log, 3)
    if noted is not None:
        archive(log, noted)

    rows, found = empty(log, 1, archived=True) or (0, "")

    assert rows == 3
    assert found is None if kept_by is None else kept_by in str(found)


def test_rows_of_an_archived_day_that_lie_in_segments_and_in_its_table_count_together(log: Connection) -> None:
    settled(log, 3)
    settled(log, 2)
    log.execute("SELECT outbox.make_day('message_sent', day) FROM (" + SENT_DAY + ") AS two (day)")
    log.execute("""
        INSERT INTO outbox.message (aggregate_type, event_type, payload, state, sent_at)
        VALUES ('a', 'e', '1', 'sent', now() - interval '2 days')
    """)
    archive(log, 6)

    assert [empty(log, number, archived=True) for number in (1, 2)] == [(3, None), (2, None)]
    assert log.execute("SELECT rows, emptied FROM outbox.archived_day").fetchone() == (6, 5)


def test_a_row_that_was_sent_after_its_day_was_archived_keeps_its_segment(log: Connection) -> None:
    """After others of that day have left: by those that are left alone it would not be found."""
    settled(log, 3)
    archive(log, 3)
    empty(log, 1, archived=True)
    settled(log, 2)

    assert "it has 5 rows and 3 are archived" in str(empty(log, 2, archived=True))


@pytest.mark.parametrize(("archived", "dry_run"), [(None, False), (False, None)])
def test_a_segment_is_not_emptied_by_an_argument_that_is_null(
    log: Connection, archived: bool | None, dry_run: bool | None
) -> None:
    settled(log, 1)

    with pytest.raises(psycopg.errors.InvalidParameterValue):
        log.execute("SELECT outbox.empty_segment(1, %s, %s)", [archived, dry_run])


def test_a_dry_run_empties_nothing_and_says_what_would_be(log: Connection) -> None:
    settled(log, 3)

    assert log.execute("SELECT rows, kept_by FROM outbox.empty_segment(1, false, true)").fetchone() == (3, None)
    assert log.execute("SELECT count(*) FROM outbox.message_log_1").fetchone() == (3,)


def test_no_job_of_spark_begins_with_a_day_whose_segment_is_being_emptied(
    log: Connection, other_connection: Connection
) -> None:
    settled(log, 1)
    (day,) = log.execute(SENT_DAY).fetchone() or (None,)
    take = "SELECT pg_try_advisory_lock_shared(hashtextextended('outbox.day ' || %s::date, 0))"

    with log.transaction():
        assert empty(log, 1) == (1, None)
        while_emptying = other_connection.execute(take, [day]).fetchone()
    assert while_emptying == (False,)
    assert other_connection.execute(take, [day]).fetchone() == (True,)
    settled(log, 1)

    assert "spark/jobs/archive.py or replay.py reads it" in str(empty(log, 2))


def test_an_emptied_segment_is_dropped_and_its_ids_have_a_place_still(log: Connection) -> None:
    settled(log, 2)
    settled(log, 2)
    for number in (1, 2):
        empty(log, number)

    assert [drop(log) for _ in range(3)] == [1, 2, None]
    log.execute(NAMED, [7])
    log.execute(NAMED, [IDS + 7])
    mark(log)

    assert log.execute(PLACES).fetchall() == [("outbox.message_log_0", 2)]
    assert log.execute("SELECT count(*) FROM outbox.receipt_0").fetchone() == (2,)
    assert log.execute(SEGMENTS).fetchall() == [(0, 2), (3, 2)]
    gaps = "SELECT count(*) FROM outbox.segment AS one JOIN outbox.segment AS next ON one.past = next.first"
    assert log.execute(gaps).fetchone() == (len(log.execute(SEGMENTS).fetchall()) - 1,)
    assert [empty(log, 0), empty(log, 0)] == [(2, None), (0, None)]
    assert log.execute(PLACES).fetchall() == []


def test_segments_are_dropped_in_the_order_of_their_ids(log: Connection) -> None:
    settled(log, 2)
    settled(log, 2)
    empty(log, 2)

    assert drop(log) is None
    assert log.execute(SEGMENTS).fetchall() == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_a_late_row_in_an_emptied_segment_keeps_it_until_it_is_sent(log: Connection) -> None:
    settled(log, 2)
    empty(log, 1)
    log.execute(NAMED, [7])

    assert drop(log) is None
    assert log.execute("SELECT id FROM outbox.message_log").fetchall() == [(7,)]
    mark(log)
    assert empty(log, 1) == (1, None)
    assert drop(log) == 1


def test_a_writer_that_took_its_id_before_the_segment_was_dropped_writes_its_row(
    log: Connection, other_connection: Connection
) -> None:
    """Its statement is prepared, and its transaction open, since before."""
    other_connection.prepare_threshold = 0
    with other_connection.transaction():
        other_connection.execute("SELECT pg_current_xact_id()")
        late = other_connection.execute("SELECT nextval('outbox.message_id_seq')").fetchone() or (0,)
        settled(log, 2)
        empty(log, 1)
        assert drop(log) == 1
        other_connection.execute(NAMED, late)

    assert log.execute(PLACES).fetchall() == [("outbox.message_log_0", 1)]


@pytest.mark.parametrize("far", ["rows in far", "late rows", "late receipts"])
def test_nothing_is_dropped_while_that_would_read_many_rows_under_a_lock(log: Connection, far: str) -> None:
    settled(log, 2)
    empty(log, 1)
    few = {
        "rows in far": """
            INSERT INTO outbox.message (id, aggregate_type, event_type, payload) VALUES (1000000, 'a', 'e', '1')
        """,
        "late rows": """
            INSERT INTO outbox.message (id, aggregate_type, event_type, payload)
            SELECT -n, 'a', 'e', '1' FROM generate_series(1, 10001) AS n
        """,
        "late receipts": """
            INSERT INTO outbox.receipt (block, n, ids)
            SELECT -n, 1, ARRAY[-n << 12] FROM generate_series(1::bigint, 10001) AS n
        """,
    }
    log.execute(few[far].encode())

    assert drop(log) is None
    assert (1, 2) in log.execute(SEGMENTS).fetchall()


HELD = {
    "SELECT outbox.ensure_segments(3, 4096)": "LOCK outbox.message_log IN ROW EXCLUSIVE MODE",
    "SELECT outbox.cut_segment()": "LOCK outbox.segment IN ROW EXCLUSIVE MODE",
    "SELECT outbox.empty_segment(2, false, false)": "LOCK outbox.message_log_2 IN ROW EXCLUSIVE MODE",
    "SELECT outbox.drop_segment()": "LOCK outbox.message_log IN ROW EXCLUSIVE MODE",
}


@pytest.mark.parametrize("call", HELD)
def test_each_step_gives_way_to_a_writer_that_stays(
    log: Connection, other_connection: Connection, call: LiteralString
) -> None:
    settled(log, 2)
    settled(log, 2)
    empty(log, 1)
    log.execute("SET statement_timeout = '5s'")

    with other_connection.transaction():
        other_connection.execute(HELD[call].encode())
        with pytest.raises(psycopg.errors.LockNotAvailable):
            log.execute(call)

    log.execute(call)


def test_no_id_is_given_twice_when_a_segment_is_cut_under_writers(
    log: Connection, other_connection: Connection
) -> None:
    """They run over the border of the segment while it is cut, which must not bring the sequence back."""
    taken: list[object] = []
    take = "SELECT nextval('outbox.message_id_seq') FROM generate_series(1, %s)"
    with ThreadPoolExecutor(1) as thread:
        for _ in range(4):
            ensure(log, 40)
            taking = thread.submit(lambda: other_connection.execute(take, [30 * IDS]).fetchall())
            while not taking.done():
                log.execute(CUT)
            taken += [number for (number,) in taking.result()]

    assert len(set(taken)) == len(taken)


def test_roles_of_a_relay_read_each_segment(log: Connection) -> None:
    role = f"relay_{secrets.token_hex(6)}"
    log.execute(f"CREATE ROLE {role}; GRANT SELECT ON outbox.message_log, outbox.message_log_far TO {role}".encode())
    try:
        log.execute(INSERT, [4 * IDS])
        ensure(log, 2)

        may = """
            SELECT inhrelid::regclass::text FROM pg_inherits
            WHERE inhparent = 'outbox.message_log'::regclass AND has_table_privilege(%s, inhrelid, 'SELECT')
        """
        made = {name for (name,) in log.execute(may, [role])}
    finally:
        log.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())

    assert made >= {f"outbox.message_log_{name}" for name in ("far", "4", "5", "6")}


WRITERS = 64
LONGEST_WAIT = 0.2  # seconds, for a lock: 0.06 were seen under a load of 20 on two cores
SECONDS = 8.0
ROW = ("invoice", "InvoiceIssued", "1")
COLUMNS = "outbox.message (aggregate_type, event_type, payload)"


class Writers:
    """Writes during a test: single rows by prepared statements, many by COPY; one in ten transactions is undone."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.rows = 0
        self.errors: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(WRITERS) as threads:
            done = [threads.submit(self._write, number) for number in range(WRITERS)]
            try:
                yield
            finally:
                self._over.set()
            for each in done:
                each.result(60)

    def _write(self, number: int) -> None:
        with psycopg.connect(self._url, autocommit=True, prepare_threshold=0) as connection:
            while not self._over.is_set():
                try:
                    self._write_once(connection, number)
                except psycopg.Error as error:
                    self.errors.append(f"writer {number}: {error}")
                    return

    def _write_once(self, connection: Connection, number: int) -> None:
        is_undone = secrets.randbelow(10) == 0
        rows = 20 if number % 4 == 0 else 1
        with connection.transaction(force_rollback=is_undone):
            if rows > 1:
                with connection.cursor().copy(f"COPY {COLUMNS} FROM STDIN".encode()) as copy:
                    for _ in range(rows):
                        copy.write_row(ROW)
            else:
                connection.execute(f"INSERT INTO {COLUMNS} VALUES (%s, %s, %s)".encode(), ROW)
        with self._lock:
            self.rows += 0 if is_undone else rows
        time.sleep(secrets.randbelow(50) / 1000)  # as an application does something else between its transactions


def test_writers_never_fail_nor_wait_while_segments_are_made_cut_and_emptied(
    log: Connection, other_connection: Connection, database_url: str
) -> None:
    log.execute("ALTER SEQUENCE outbox.message_id_seq CACHE 50")
    writers = Writers(database_url)
    waits: list[float] = []
    emptied: list[Any] = []
    dropped: list[object] = []
    over = threading.Event()

    def watch() -> None:
        with psycopg.connect(database_url, autocommit=True) as watcher:
            while not over.wait(0.005):
                (longest,) = watcher.execute(WAITS).fetchone() or (None,)
                waits.append(longest or 0.0)

    def for_a_while(work: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS / 2
        while time.monotonic() < end:
            work()

    def upkeep() -> None:
        ensure(log, 2, tries=1)
        log.execute(CUT)
        mark(log)
        for (number,) in log.execute(OPEN_SEGMENTS).fetchall():
            try:
                (rows, kept_by) = empty(log, number) or (0, "")
            except psycopg.errors.LockNotAvailable:
                continue
            if kept_by is None:
                emptied.append(rows)
        with suppress(psycopg.errors.LockNotAvailable):
            dropped.append(drop(log))

    with ExitStack() as stack:
        watching = stack.enter_context(ThreadPoolExecutor(1)).submit(watch)
        with writers.running():
            for_a_while(upkeep)
            with other_connection.transaction():  # open all the while: no segment can be made
                other_connection.execute(INSERT, [1])
                last = log.execute("SELECT max(past) FROM outbox.segment").fetchone()
                while log.execute("SELECT last_value FROM outbox.message_id_seq").fetchone() <= last:  # type: ignore[operator]
                    ensure(log, 2, tries=1)
                    if log.execute(CUT).fetchone() == (None,):
                        log.execute("SELECT nextval('outbox.message_id_seq') FROM generate_series(1, 500)")
            ensure(log, 2)
            for_a_while(upkeep)
        over.set()
        watching.result(20)

    assert writers.errors == []
    mark(log)
    (kept, ids) = log.execute("SELECT count(*), count(DISTINCT id) FROM outbox.message_log").fetchone() or (0, 1)
    assert kept == ids
    assert kept + sum(emptied) == writers.rows + 1
    assert len([rows for rows in emptied if rows > 0]) > 2
    assert len(set(dropped)) > 2
    assert max(waits) <= LONGEST_WAIT
