"""0015: the log, its segments and receipts, beside writers that never stop; the surfaces over both storages."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import LiteralString

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.errors import SchemaError
from relay.operate.migrate import downgrade, migrate
from tests.engine.test_plans import nodes
from tests.migrations.catalog import description
from tests.migrations.conftest import Connection, url_of
from tests.migrations.test_message_state import plan_of
from tests.support.process import wait_for

pytestmark = pytest.mark.every_postgres

IDS = 4096  # in a segment, and in a block
TO_THE_LOG = "ALTER TABLE ONLY outbox.message ALTER COLUMN state SET DEFAULT 'written'"
INSERT = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'invoice', n::text, 'InvoiceIssued', '1' FROM generate_series(1, %s) AS n
"""
# All rows of the log that are not sent: what a relay would do, two days ago.
MARK = """
    INSERT INTO outbox.receipt (block, n, node, ids, sent_at)
    SELECT id >> 12, count(*), 'relay-1', array_agg(id ORDER BY id), now() - interval '2 days'
    FROM (SELECT id FROM outbox.message_log_pending ORDER BY id) AS row GROUP BY 1
"""
ENSURE = "SELECT outbox.ensure_segments(%s, %s)"
CUT = "SELECT outbox.cut_segment()"
EMPTY = "SELECT rows, kept_by FROM outbox.empty_segment(%s, false)"
OPEN_SEGMENTS = """
    SELECT number FROM outbox.segment
    WHERE emptied_at IS NULL AND past <= (SELECT last_value FROM outbox.message_id_seq) ORDER BY number
"""
PLACES = "SELECT tableoid::regclass::text, count(*) FROM outbox.message GROUP BY 1 ORDER BY 1"
COUNTS = "SELECT state, messages FROM outbox.message_count WHERE messages > 0 ORDER BY state"
# By what the rows and receipts say themselves, without any checkpoint.
TRUTH = """
    SELECT state, count(*) FROM (
        SELECT CASE WHEN EXISTS (SELECT FROM outbox.receipt WHERE row.id = ANY (ids)) THEN 'sent' ELSE 'pending' END
        FROM outbox.message_log AS row
    ) AS told (state) GROUP BY 1 ORDER BY 1
"""
CHECKPOINT = """
    INSERT INTO outbox.checkpoint (cluster, lanes, lows, seen_to, unseen, position)
    SELECT system_identifier, %s::smallint[], %s::bigint[], pg_snapshot_xmax(snapshot)::text::bigint,
        ARRAY(SELECT xid::text::bigint FROM pg_snapshot_xip(snapshot) AS xid), 0
    FROM pg_control_system(), pg_current_snapshot() AS snapshot
"""
WAITS = """
    SELECT max(extract(epoch FROM clock_timestamp() - waitstart))::float8 FROM pg_locks
    WHERE NOT granted AND locktype = 'relation' AND mode = 'RowExclusiveLock'
"""


@pytest.fixture
def log(connection: Connection) -> Connection:
    """A table whose new rows go to the log, with a segment for them and two ahead."""
    ensure(connection, 2)
    connection.execute(TO_THE_LOG)
    return connection


def ensure(connection: Connection, ahead: int = 2, *, tries: int = 200) -> list[object]:
    """Make segments until there are so many ahead, as a relay does; return the steps."""
    steps: list[object] = []
    while tries:
        try:
            (step,) = connection.execute(ENSURE, [ahead, IDS]).fetchone() or (None,)
        except psycopg.errors.LockNotAvailable:
            tries -= 1
            continue
        if step is None:
            break
        steps.append(step)
    return steps


def empty(connection: Connection, number: object) -> tuple[object, ...] | None:
    return connection.execute(EMPTY, [number]).fetchone()


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
    log.execute(MARK)
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
    assert log.execute(COUNTS).fetchall() == [("pending", 1), ("sent", 5)]
    days = "message_sent_"
    assert [line for line in after if days not in line] == [
        line.replace("'written'::text", "'pending'::text") if line.startswith("message.state ") else line
        for line in before
        if days not in line
    ]


def test_there_is_no_way_back_while_a_row_of_the_log_is_not_sent(database: DatabaseSettings, log: Connection) -> None:
    log.execute(INSERT, [5])
    log.execute(MARK)
    log.execute(INSERT, [1])

    with pytest.raises(SchemaError, match="1 messages of the log are not sent"):
        downgrade(database, "0014")

    assert log.execute(COUNTS).fetchall() == [("pending", 1), ("sent", 5)]


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
    log.execute(MARK)

    assert empty(log, 1) == (10, None)
    assert log.execute("SELECT rows, sent, emptied_at <= now() FROM outbox.segment WHERE number = 1").fetchone() == (
        10, 10, True,
    )  # fmt: skip
    assert log.execute("SELECT count(*) FROM outbox.message_log_1").fetchone() == (0,)
    assert log.execute("SELECT count(*) FROM outbox.receipt_1").fetchone() == (0,)


def test_a_row_without_a_receipt_keeps_its_segment(log: Connection) -> None:
    log.execute(INSERT, [9])
    log.execute(MARK)
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
    log.execute(MARK)
    log.execute("INSERT INTO outbox.replay (made_by, filter) VALUES ('me', '{}')")

    (_, kept_by) = empty(log, 1) or (0, "")

    assert str(kept_by).startswith("replay 1 needs it")


@pytest.mark.parametrize("number", [1, 2, 4711], ids=["in use", "ahead", "not there"])
def test_a_segment_whose_ids_are_still_given_is_refused(log: Connection, number: int) -> None:
    with pytest.raises((psycopg.errors.InvalidParameterValue, psycopg.errors.UndefinedTable)):
        empty(log, number)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_snapshot_from_before_empties_no_segment(log: Connection, level: LiteralString) -> None:
    log.execute(INSERT, [1])
    log.execute(CUT)
    log.execute(MARK)

    log.execute("SET default_transaction_isolation = '" + level + "'")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="READ COMMITTED"):
        empty(log, 1)


def test_a_late_writer_keeps_its_segment_whatever_the_moment(log: Connection, other_connection: Connection) -> None:
    """It has an id of the segment; it inserts before the segment is emptied, or after, and its row is there."""
    log.execute(INSERT, [1])
    late = [number for (number,) in log.execute("SELECT nextval('outbox.message_id_seq') FROM generate_series(1, 2)")]
    log.execute(CUT)
    log.execute(MARK)
    named = "INSERT INTO outbox.message (id, aggregate_type, event_type, payload) VALUES (%s, 'a', 'e', '1')"

    with other_connection.transaction():
        other_connection.execute(named, [late[0]])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            empty(log, 1)
    assert empty(log, 1) == (2, "1 of its rows have no receipt: the relay has not sent them")
    log.execute(MARK)
    assert empty(log, 1) == (2, None)
    other_connection.execute(named, [late[1]])

    assert log.execute(COUNTS).fetchall() == [("pending", 1)]
    assert log.execute("SELECT id FROM outbox.message_log_pending").fetchone() == (late[1],)


def test_a_row_that_commits_between_the_two_looks_keeps_its_segment(
    log: Connection, other_connection: Connection
) -> None:
    """The second look under the lock finds it: by then the first one has counted, and waits."""
    log.execute(INSERT, [1])
    late = log.execute("SELECT nextval('outbox.message_id_seq')").fetchone()
    log.execute(CUT)
    log.execute(MARK)
    log.execute("SET lock_timeout = 0")
    log.execute("ALTER FUNCTION outbox.empty_segment(bigint, boolean) SET lock_timeout = '20s'")
    with ThreadPoolExecutor(1) as thread:
        with other_connection.transaction():
            other_connection.execute(
                "INSERT INTO outbox.message (id, aggregate_type, event_type, payload) VALUES (%s, 'a', 'e', '1')", late
            )
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
    log.execute(MARK)

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


def test_the_far_segment_becomes_one_without_being_read_under_a_lock(log: Connection) -> None:
    log.execute(INSERT, [4 * IDS])
    told: list[str] = []
    log.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
    log.execute("SET client_min_messages = debug1")

    for _ in range(3):
        log.execute(ENSURE, [2, IDS])

    assert 'partition constraint for table "message_log_4" is implied by existing constraints' in told


def test_the_surfaces_answer_by_checkpoint_as_without_one(log: Connection, other_connection: Connection) -> None:
    """One lane's checkpoint is behind the others, and a transaction that it could not see commits below it."""
    log.execute(INSERT, [300])
    with other_connection.transaction():
        other_connection.execute(INSERT, [20])
        log.execute(INSERT, [100])
        log.execute(MARK)
        (low,) = log.execute("SELECT last_value FROM outbox.message_id_seq").fetchone() or (0,)
        log.execute(CHECKPOINT, [list(range(15)), [low] * 15])
        log.execute(CHECKPOINT, [[15], [50]])
    log.execute(INSERT, [30])

    assert log.execute(COUNTS).fetchall() == log.execute(TRUTH).fetchall() == [("pending", 50), ("sent", 400)]
    states = "SELECT state, sent_at IS NOT NULL, count(*) FROM outbox.message_state GROUP BY 1, 2 ORDER BY 1"
    assert log.execute(states).fetchall() == [("pending", False, 50), ("sent", True, 400)]


def test_a_checkpoint_of_another_cluster_says_nothing(log: Connection) -> None:
    log.execute(INSERT, [3])
    log.execute("""
        INSERT INTO outbox.checkpoint (cluster, lanes, lows, seen_to, unseen, position)
        SELECT 1, array_agg(lane), array_agg(1000), 1000000, '{}', 0 FROM generate_series(0, 15) AS lane
    """)

    assert log.execute(COUNTS).fetchall() == [("pending", 3)]


def test_parked_messages_are_sought_without_the_log(log: Connection) -> None:
    plan = plan_of(log, "SELECT * FROM outbox.message_state WHERE state IN ('parked', 'discarded') AND id = 7")

    assert {node["Relation Name"] for node in nodes(plan) if "Relation Name" in node} == {
        "message_parked", "message_discarded",
    }  # fmt: skip


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
LONGEST_WAIT = 0.2  # seconds, for a lock: 0.06 were seen beside a load of 20 on two cores
SECONDS = 8.0
ROW = ("invoice", "InvoiceIssued", "1")
COLUMNS = "outbox.message (aggregate_type, event_type, payload)"


class Writers:
    """Writes beside the test: single rows by prepared statements, many by COPY; one in ten transactions is undone."""

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
    emptied: list[object] = []
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
        log.execute(MARK)
        for (number,) in log.execute(OPEN_SEGMENTS).fetchall():
            try:
                (_, kept_by) = empty(log, number) or (0, "")
            except psycopg.errors.LockNotAvailable:
                continue
            if kept_by is None:
                emptied.append(number)

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
    log.execute(MARK)
    kept = log.execute("SELECT count(*), count(DISTINCT id) FROM outbox.message_log").fetchone()
    gone = log.execute("SELECT coalesce(sum(rows), 0)::bigint FROM outbox.segment").fetchone()
    assert kept is not None
    assert gone is not None
    assert kept[0] == kept[1]
    assert kept[0] + gone[0] == writers.rows + 1  # type: ignore[operator]
    assert log.execute("SELECT count(*) FROM outbox.message_log_pending").fetchone() == (0,)
    assert len(emptied) > 2
    assert max(waits) <= LONGEST_WAIT
