"""The benchmark of marks measures what it says: both storages mark the same rows, and receipts leave no dead ones."""

from typing import Any

import psycopg
import pytest

from bench.frame.storage import Storage, use
from bench.frame.writers import writer_pool
from bench.marks import ReadTables, Tables, measure_marks, measure_reads, measure_vacuum, measure_writers
from tests.support.postgres import NEWEST, PostgresServer

ROWS = 60

SENT = {
    Storage.PENDING: "SELECT array_agg(id ORDER BY id) FROM outbox.message_sent",
    Storage.LOG: "SELECT array_agg(id ORDER BY id) FROM outbox.receipt, unnest(ids) AS id",
}
WRITTEN = {
    Storage.PENDING: "SELECT array_agg(id ORDER BY id) FROM outbox.message",
    Storage.LOG: "SELECT array_agg(id ORDER BY id) FROM outbox.message_log",
}
COUNTED = "SELECT sum(messages) FROM outbox.published"


@pytest.fixture(params=Storage)
def tables(request: pytest.FixtureRequest, database_url: str) -> Tables:
    use(request.param, database_url)
    return Tables(database_url, request.param)


@pytest.mark.parametrize("size", [7, 1000])
def test_every_row_that_is_written_is_marked_once_and_counted(tables: Tables, size: int) -> None:
    figures = measure_marks(tables, ROWS, size)

    assert ask(tables, WRITTEN[tables.storage]) == ask(tables, SENT[tables.storage])
    assert len(ask(tables, SENT[tables.storage])) == ask(tables, COUNTED) == ROWS
    assert min(figures["mark_cpu"], figures["late_mark_cpu"], figures["insert_cpu"]) > 0
    assert figures["mark_wal"] > 0


def test_only_a_mark_that_moves_rows_leaves_dead_ones(tables: Tables) -> None:
    figures = measure_marks(tables, ROWS, 7)

    assert figures["dead"] == (1 if tables.storage is Storage.PENDING else 0)


@pytest.mark.drills
def test_vacuum_is_told_apart_from_freezing(tables: Tables) -> None:
    figures = measure_vacuum(tables, ROWS)

    assert min(figures["vacuum_cpu"], figures["late_vacuum_cpu"], figures["freeze_cpu"]) > 0
    assert figures["late_total"] > 1


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_server_has_the_checksums_that_it_was_asked_for(has_checksums: bool) -> None:
    with PostgresServer(NEWEST, has_checksums=has_checksums) as server, psycopg.connect(server.admin_url) as connection:
        row = connection.execute("SELECT current_setting('data_checksums')").fetchone()

    assert row == ("on" if has_checksums else "off",)


@pytest.mark.parametrize("sent", [0, 5000])
def test_the_same_rows_are_read_behind_none_and_many_sent_ones(tables: Tables, sent: int) -> None:
    filled = ReadTables.fill(tables, sent)

    first, second = measure_reads(filled), measure_reads(filled)

    assert min(first.values()) > 0
    assert first["read_buffers"] == pytest.approx(second["read_buffers"], abs=0.5)
    is_walked_over = first["near_buffers"] > first["read_buffers"] + 0.5  # pending rows are gone from the index
    assert is_walked_over == (tables.storage is Storage.LOG)


@pytest.mark.drills
def test_writers_are_counted_in_both_storages(tables: Tables) -> None:
    with writer_pool() as writers:
        assert measure_writers(tables, writers, 1.0)["rate"] > 0


def ask(tables: Tables, query: str) -> Any:
    with tables.connect() as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]
