"""What an application handed over is seen, also what it rolled back; and autocommit can be forbidden."""

from threading import Thread

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from relay.outbox import Event, NoTransactionError, OutboxMessage, add, add_many
from relay.testing import Outbox, capture, require_transaction

PLACED = Event("Order", "1", "OrderPlaced", {"total": 5}, headers={"source": "shop"})
PAID = Event("Order", "1", "OrderPaid", {"total": 5})


def engine(url: str, **options: str) -> sa.Engine:
    return sa.create_engine(
        url.replace("postgresql://", "postgresql+psycopg://"), poolclass=sa.pool.NullPool, **options
    )


def place_and_fail(connection: psycopg.Connection) -> None:
    with connection.transaction():
        add(connection, PLACED)
        raise ZeroDivisionError


def test_what_was_rolled_back_is_in_the_list_and_not_in_the_outbox(connection: psycopg.Connection) -> None:
    with capture() as events:
        with pytest.raises(ZeroDivisionError):
            place_and_fail(connection)
        add_many(connection, [PAID])

    assert events == [PLACED, PAID]
    assert [event.state for event in events] == [None, None]
    assert [event for event in events if event not in Outbox(connection).all()] == [PLACED]


def test_a_mapped_event_is_seen(database_url: str) -> None:
    with Session(engine(database_url)) as session, capture() as events:
        session.add(OutboxMessage(PLACED))

        assert events == [PLACED]
        assert Outbox(session).all() == [PLACED]


def test_each_thread_is_seen_and_nothing_after_the_end(connection: psycopg.Connection) -> None:
    with capture() as outer:
        with capture() as inner:
            other = Thread(target=add, args=(connection, PLACED))
            other.start()
            other.join()
        add(connection, PAID)
    add(connection, PAID)

    assert inner == [PLACED]
    assert outer == [PLACED, PAID]


def test_overlapping_blocks_end_each_for_itself(database_url: str) -> None:
    first, second = require_transaction(), require_transaction()
    with psycopg.connect(database_url, autocommit=True) as connection:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        with pytest.raises(NoTransactionError):
            add(connection, PLACED, autocommit=True)
        second.__exit__(None, None, None)
        add(connection, PAID, autocommit=True)

        assert Outbox(connection).all() == [PAID]


def test_autocommit_is_refused_where_a_transaction_is_required(database_url: str) -> None:
    committing = engine(database_url, isolation_level="AUTOCOMMIT")
    with psycopg.connect(database_url, autocommit=True) as connection, Session(committing) as session:
        with require_transaction():
            with pytest.raises(NoTransactionError):
                add(connection, PLACED, autocommit=True)
            with pytest.raises(NoTransactionError):
                add_many(session, [PLACED], autocommit=True)
            session.add(OutboxMessage(PLACED, autocommit=True))
            with pytest.raises(NoTransactionError):
                session.flush()
            session.rollback()
            with connection.transaction():
                add(connection, PAID, autocommit=True)
        add(connection, PLACED, autocommit=True)

        assert Outbox(connection).all() == [PAID, PLACED]
