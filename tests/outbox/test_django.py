"""What is written by a connection of Django goes through Django: its query log, wrappers, errors and transactions."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import ProgrammingError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from relay.outbox import Event, NoTransactionError, add, add_many
from relay.testing import Outbox
from tests.outbox.conftest import MessageTable
from tests.outbox.writers import django_wrapper

EVENT = Event("customer", "17", "InvoiceIssued", {"n": 1})
MANY = [Event("customer", "17", "InvoiceIssued", {"n": number}) for number in range(60)]


@pytest.fixture
def connection(module_url: str, table: MessageTable) -> Iterator[Any]:
    connection = django_wrapper(module_url)
    connection.ensure_connection()
    yield connection
    connection.rollback()
    connection.close()


def test_the_query_log_has_each_statement(connection: Any) -> None:
    with CaptureQueriesContext(connection) as queries:
        add(connection, EVENT)
        add_many(connection, MANY)

    (insert, copy) = (query["sql"] for query in queries)
    assert re.match(r"\s*INSERT INTO \"outbox\".message \(", insert)
    assert "'InvoiceIssued'" in insert
    assert copy.startswith('COPY "outbox".message (')


def test_a_look_at_the_outbox_is_no_query_of_the_application(connection: Any) -> None:
    with CaptureQueriesContext(connection) as queries:
        Outbox(connection).assert_nothing_written()

    assert len(queries) == 0


def test_execute_wrappers_see_each_statement(connection: Any) -> None:
    def refuse(_execute: object, sql: str, *_: object) -> None:
        raise AssertionError(sql.split(maxsplit=1)[0])

    with connection.execute_wrapper(refuse):
        with pytest.raises(AssertionError, match="INSERT"):
            add(connection, EVENT)
        with pytest.raises(AssertionError, match="INSERT"):
            add_many(connection, MANY)


class Blocker:
    """It forbids the database as pytest-django does to a test without its mark: by its own method."""

    def refuse(self, *_: object) -> None:
        raise RuntimeError("Database access not allowed")


@pytest.mark.parametrize("is_open", [True, False])
def test_where_the_database_is_forbidden_the_error_is_that_of_who_forbids_it(
    connection: Any, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_open:
        connection.close()
    with monkeypatch.context() as patch:
        patch.setattr(BaseDatabaseWrapper, "ensure_connection", Blocker().refuse)
        with pytest.raises(RuntimeError, match="Database access not allowed"):
            add(connection, EVENT)


def test_what_a_cursor_has_read_stays_when_it_is_the_target(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT generate_series(1, 3)")
        add(cursor, EVENT)

        assert cursor.fetchall() == [(1,), (2,), (3,)]


@pytest.mark.parametrize("write", [add, add_many])
def test_an_error_is_one_of_django_with_the_remedy(connection: Any, write: Any) -> None:
    with pytest.raises(ProgrammingError) as raised:
        write(connection, MANY, schema="elsewhere")

    assert raised.value.__notes__ == [
        "`relay migrate` makes the tables of schema elsewhere; `add` takes another name as schema=..."
    ]


@pytest.mark.parametrize("write", [add, add_many])
def test_a_transaction_that_must_be_rolled_back_takes_no_event(connection: Any, write: Any) -> None:
    connection.in_atomic_block, connection.needs_rollback = True, True
    try:
        with pytest.raises(TransactionManagementError):
            write(connection, MANY)
    finally:
        connection.in_atomic_block = connection.needs_rollback = False


def test_the_transaction_of_a_test_case_is_none_of_the_application(connection: Any) -> None:
    of_the_test = transaction.Atomic(None, False, False)
    of_the_test._from_testcase = True
    connection.atomic_blocks.append(of_the_test)
    try:
        with pytest.raises(NoTransactionError):
            add(connection, EVENT)
        add(connection, EVENT, autocommit=True)
        connection.atomic_blocks.append(transaction.Atomic(None, False, False))
        add(connection, EVENT)
    finally:
        connection.atomic_blocks.clear()

    assert len(Outbox(connection).all()) == 2
