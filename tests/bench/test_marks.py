"""The benchmark of marks measures what it says: both ways mark the same rows, and receipts leave no dead ones."""

from typing import Any, cast

import psycopg
import pytest
from pydantic import SecretStr

from bench.frame import queue
from bench.frame.backlog import AGGREGATE_TYPE, EVENT_TYPE, Backlog, Keys, prepare
from bench.frame.error import BenchmarkError
from bench.frame.receipts import (
    LAST,
    Sight,
    Snapshot,
    TransactionId,
    make_log,
    read_log_statement,
    receipts,
    sight_parameters,
)
from bench.frame.servers import Servers
from bench.frame.writers import INSERT, PAYLOAD
from bench.marks import (
    ReadTables,
    Tables,
    Way,
    measure_drain,
    measure_insert,
    measure_marks,
    measure_reads,
    measure_vacuum,
)
from relay.config.settings import DatabaseSettings
from relay.engine.session.session import LANES, LaneSession, array_text
from tests.support.postgres import NEWEST, PostgresServer

ROWS = 60
DRAINED = 8000  # more than a read brings of a transaction that was open during the last one

SENT = {
    Way.MOVE: "SELECT array_agg(id ORDER BY id) FROM outbox.message_sent",
    Way.RECEIPTS: "SELECT array_agg(id ORDER BY id) FROM outbox.receipt, unnest(ids) AS id",
}
WRITTEN = {
    Way.MOVE: "SELECT array_agg(id ORDER BY id) FROM outbox.message",
    Way.RECEIPTS: "SELECT array_agg(id ORDER BY id) FROM outbox.message_log_0",
}
SNAPSHOT = "SELECT pg_current_snapshot()::text"
COUNTED = "SELECT sum(messages) FROM outbox.published"


@pytest.fixture(params=Way)
def tables(request: pytest.FixtureRequest, database_url: str) -> Tables:
    if request.param is Way.RECEIPTS:
        make_log(database_url)
    return Tables(database_url, request.param)


@pytest.fixture
def backlog(servers: Servers) -> Backlog:
    """Rows to drain, drawn where they are listed for the C client."""
    return prepare(servers.database_url, servers.folder, Keys.CDNOW, rows=DRAINED)


@pytest.mark.parametrize("size", [7, 1000])
def test_every_row_that_is_written_is_marked_once_and_counted(tables: Tables, size: int) -> None:
    figures = measure_marks(tables, ROWS, size)

    assert ask(tables, WRITTEN[tables.way]) == ask(tables, SENT[tables.way])
    assert len(ask(tables, SENT[tables.way])) == ask(tables, COUNTED) == ROWS
    assert min(figures["mark_cpu"], figures["late_mark_cpu"], figures["insert_cpu"]) > 0
    assert figures["mark_wal"] > 0


def test_only_a_mark_that_moves_rows_leaves_dead_ones(tables: Tables) -> None:
    figures = measure_marks(tables, ROWS, 7)

    assert figures["dead"] == (1 if tables.way is Way.MOVE else 0)


def test_vacuum_is_told_apart_from_freezing(tables: Tables) -> None:
    figures = measure_vacuum(tables, ROWS)

    assert min(figures["vacuum_cpu"], figures["late_vacuum_cpu"], figures["freeze_cpu"]) > 0
    assert figures["late_total"] > 1


@pytest.mark.parametrize("xid", TransactionId)
def test_a_log_takes_rows_whatever_they_keep_of_their_transaction(database_url: str, xid: TransactionId) -> None:
    make_log(database_url, xid)
    tables = Tables(database_url, Way.RECEIPTS)

    figures = measure_insert(tables, ROWS)

    assert min(figures["insert_cpu"], figures["insert_wal"]) > 0
    assert len(ask(tables, WRITTEN[Way.RECEIPTS])) == ROWS


def test_a_receipt_names_the_ids_of_one_block_in_order() -> None:
    given = receipts([4096, 7, 4097, 5], "a node")

    assert given == {"node": "a node", "messages": 4, "receipts": '{"{5,7}","{4096,4097}"}'}


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_server_has_the_checksums_that_it_was_asked_for(has_checksums: bool) -> None:
    with PostgresServer(NEWEST, has_checksums=has_checksums) as server, psycopg.connect(server.admin_url) as connection:
        row = connection.execute("SELECT current_setting('data_checksums')").fetchone()

    assert row == ("on" if has_checksums else "off",)


def test_the_same_rows_are_read_in_both_ways_behind_few_and_many_sent_ones(tables: Tables) -> None:
    figures = measure_reads(ReadTables.fill(tables, ROWS))

    assert min(figures["read_cpu"], figures["near_cpu"], figures["empty_cpu"]) > 0
    is_walked_over = figures["near_buffers"] > figures["read_buffers"] + 0.5  # today's are gone from the index
    assert is_walked_over == (tables.way is Way.RECEIPTS)


async def test_the_log_is_read_from_its_floor_and_below_it_for_what_was_not_seen(database_url: str) -> None:
    make_log(database_url)
    with psycopg.connect(database_url) as late, psycopg.connect(database_url, autocommit=True) as writer:
        below = insert(late)
        insert(writer)
        floor = insert(writer)
        snapshot = writer.execute(SNAPSHOT).fetchone()
        late.commit()
        above = insert(writer)
    assert snapshot is not None
    sight = Sight()
    sight.floor, sight.seen = floor, Snapshot.of(snapshot[0])
    asked = {"lanes": array_text(range(LANES)), "rows": 10}
    asked |= {"bytes": array_text([1 << 20] * LANES)} | sight_parameters([sight] * LANES, [0] * LANES)
    database = DatabaseSettings(url=SecretStr(database_url))
    async with await LaneSession.open(database) as session, session.use() as connection:
        found = await (await connection.execute(read_log_statement(session, 1 << 20), asked)).fetchall()

    assert sorted(row[1] for row in found[1:]) == [below, above]


@pytest.mark.parametrize("tables", [Way.RECEIPTS], indirect=True)
def test_a_relay_drains_a_log_and_each_row_goes_out_and_is_named_once(
    servers: Servers, tables: Tables, backlog: Backlog
) -> None:
    figures = measure_drain(tables.way, servers, backlog)

    assert (figures["lost"], queue.depth(servers.broker_url)) == (0, DRAINED)
    assert ask(tables, WRITTEN[tables.way]) == ask(tables, SENT[tables.way]) == list(range(1, DRAINED + 1))
    assert ask(tables, COUNTED) == DRAINED
    assert figures["both_cpu"] >= figures["postgres_cpu"] > 0


def test_rows_of_a_long_transaction_are_read_in_parts_and_before_all_others() -> None:
    sight, running, ended, later = Sight(), Snapshot(9, "{5}"), Snapshot(12, "{}"), Snapshot(20, "{}")
    sight.note([], 2, 0, position=10, snapshot=running)

    sight.note([1, 4], 2, 0, position=15, snapshot=ended)
    parts = [sight_parameters([sight], [0])]
    sight.note([6, 7], 2, 3, position=15, snapshot=later)
    parts.append(sight_parameters([sight], [7]))
    sight.note([], 2, 7, position=15, snapshot=later)
    then = sight_parameters([sight], [15])

    assert [(part["lows"], part["until"], part["seen_to"]) for part in parts] == [
        ("{4}", "{12}", "{9}"),
        ("{7}", "{12}", "{9}"),
    ]
    assert {part["ahead"] for part in parts} == {f"{{{LAST}}}"}
    assert (then["lows"], then["floors"], then["ahead"], then["seen_to"]) == ("{3}", "{10}", "{10}", "{12}")


def test_a_read_that_has_changed_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.frame.receipts.read_statement", lambda *_: b"SELECT")

    with pytest.raises(BenchmarkError, match="reads otherwise"):
        read_log_statement(cast("LaneSession", None), 1 << 20)


def insert(connection: psycopg.Connection) -> int:
    row = connection.execute(INSERT, (AGGREGATE_TYPE, "a key", EVENT_TYPE, PAYLOAD)).fetchone()
    assert row is not None
    return int(row[0])


def ask(tables: Tables, query: str) -> Any:
    with tables.connect() as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]
