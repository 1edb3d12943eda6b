"""Held messages are tried now: what failed is due at once, and what a consumer has in hand is left alone."""

from collections.abc import Iterator

import psycopg
import pytest

from relay.errors import NotFoundError
from relay.operate.failures import list_held_groups
from relay.operate.held import retry_held
from relay.servers.postgres.tables import Tables
from tests.operate.held import held

DUE = "SELECT key FROM outbox.held_message WHERE due_at <= now() ORDER BY key"
AUDIT = "SELECT command, target, done_by, why FROM outbox.operator_audit"


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def retry(connection: psycopg.Connection, group: str | None = None) -> int:
    return retry_held(Tables(connection, "outbox"), group, by="ada", why="mended")


def due(connection: psycopg.Connection) -> list[str]:
    return [key for (key,) in connection.execute(DUE)]


def test_what_failed_is_due_and_what_waits_behind_it_waits_on(connection: psycopg.Connection) -> None:
    held(connection, "a", messages=3)
    held(connection, "b", consumer="mail")

    assert retry(connection) == 2
    assert due(connection) == ["a", "b"]
    assert connection.execute(AUDIT).fetchall() == [("held retry", "all", "ada", "mended")]


def test_of_a_group_its_messages_alone_are_due(connection: psycopg.Connection, tables: Tables) -> None:
    held(connection, "a")
    held(connection, "b", error="no paper")
    (group,) = [each.id for each in list_held_groups(tables) if "paper" in each.cause]

    assert retry(connection, group) == 1
    assert due(connection) == ["b"]
    assert connection.execute(AUDIT).fetchall() == [("held retry", group, "ada", "mended")]


def test_what_a_consumer_tries_at_this_moment_keeps_its_time(connection: psycopg.Connection, database_url: str) -> None:
    held(connection, "claimed", due_in=9, begun=1)
    held(connection, "locked")
    held(connection, "free")
    with psycopg.connect(database_url) as consumer:
        consumer.execute("SELECT FROM outbox.held_message WHERE key = 'locked' FOR UPDATE")

        assert retry(connection) == 1

    assert due(connection) == ["free"]


def test_a_group_that_is_not_held_is_not_found(connection: psycopg.Connection) -> None:
    held(connection)

    with pytest.raises(NotFoundError, match="no message of failure group 0123456789ab is held"):
        retry(connection, "0123456789ab")
    assert connection.execute(AUDIT).fetchall() == []


def test_where_nothing_is_held_nothing_is_noted(connection: psycopg.Connection) -> None:
    assert retry(connection) == 0
    assert connection.execute(AUDIT).fetchall() == []
