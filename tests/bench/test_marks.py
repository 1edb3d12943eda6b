"""The benchmark of marks measures what it says: both ways mark the same rows, and receipts leave no dead ones."""

from typing import Any

import psycopg
import pytest

from bench.frame.receipts import TransactionId, make_log, receipts
from bench.marks import Tables, Way, measure_insert, measure_marks, measure_vacuum
from tests.support.postgres import NEWEST, PostgresServer

ROWS = 60

SENT = {
    Way.MOVE: "SELECT array_agg(id ORDER BY id) FROM outbox.message_sent",
    Way.RECEIPTS: "SELECT array_agg(id ORDER BY id) FROM outbox.receipt, unnest(ids) AS id",
}
WRITTEN = {
    Way.MOVE: "SELECT array_agg(id ORDER BY id) FROM outbox.message",
    Way.RECEIPTS: "SELECT array_agg(id ORDER BY id) FROM outbox.message_log_0",
}
COUNTED = "SELECT sum(messages) FROM outbox.published"


@pytest.fixture(params=Way)
def tables(request: pytest.FixtureRequest, database_url: str) -> Tables:
    if request.param is Way.RECEIPTS:
        make_log(database_url)
    return Tables(database_url, request.param)


@pytest.mark.parametrize("size", [7, 1000])
def test_every_row_that_is_written_is_marked_once_and_counted(tables: Tables, size: int) -> None:
    figures = measure_marks(tables, ROWS, size)

    assert asked(tables, WRITTEN[tables.way]) == asked(tables, SENT[tables.way])
    assert len(asked(tables, SENT[tables.way])) == asked(tables, COUNTED) == ROWS
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
    assert len(asked(tables, WRITTEN[Way.RECEIPTS])) == ROWS


def test_a_receipt_names_the_ids_of_one_block_in_order() -> None:
    given = receipts([4096, 7, 4097, 5], "a node")

    assert given == {"node": "a node", "messages": 4, "receipts": '{"{5,7}","{4096,4097}"}'}


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_server_has_the_checksums_that_it_was_asked_for(has_checksums: bool) -> None:
    with PostgresServer(NEWEST, has_checksums=has_checksums) as server, psycopg.connect(server.admin_url) as connection:
        row = connection.execute("SELECT current_setting('data_checksums')").fetchone()

    assert row == ("on" if has_checksums else "off",)


def asked(tables: Tables, query: str) -> Any:
    with tables.connect() as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]
