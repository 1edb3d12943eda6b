"""Causes of failures go with the sent rows: those of which no row is parked, and nothing was retried for long."""

from collections.abc import Iterator

import psycopg
import pytest

from relay.config.settings import DatabaseSettings
from relay.operate.failures import list_parked_groups
from relay.operate.retention import drop_old_days
from relay.retention.kind import SENT
from relay.servers.postgres.tables import Tables
from tests.engine.retention.conftest import KEEP, OLD, round_of
from tests.operate.rows import Rows
from tests.support.roles import granted_roles, role

MANY = 20_000
SEEN = """
    INSERT INTO outbox.failure (id, source, cause, event_type, place, seen_at)
    SELECT 'old-' || n, 'parked', 'refused', 'Type' || n, '', now() - %s * interval '1 day'
    FROM generate_series(1, %s) AS n
"""
COUNT = "SELECT count(*) FROM outbox.failure"
AGE_ALL = "UPDATE outbox.failure SET seen_at = now() - interval '1 year'"


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    written = Rows(database_url)
    with written.connection:
        yield written


def count(rows: Rows) -> int:
    (number,) = rows.connection.execute(COUNT).fetchone() or (0,)
    return int(number)


async def test_old_causes_of_many_event_types_are_forgotten(rows: Rows, database: DatabaseSettings) -> None:
    rows.connection.execute(SEEN, [OLD, MANY])
    rows.connection.execute(SEEN.replace("old-", "new-"), [KEEP - 1, 3])

    events = await round_of(database)

    assert {"event": "retention.failures_forgotten", "log_level": "info", "causes": MANY} in events
    assert count(rows) == 3


async def test_a_cause_of_a_parked_row_stays_and_so_does_one_that_was_retried(
    rows: Rows, database: DatabaseSettings
) -> None:
    rows.parked("1", event_type="Parked")
    rows.connection.execute(SEEN, [OLD, 2])
    rows.connection.execute(AGE_ALL)
    rows.connection.execute("UPDATE outbox.failure SET retried = 1 WHERE id = 'old-1'")

    await round_of(database)

    left = rows.connection.execute("SELECT id, event_type FROM outbox.failure ORDER BY id DESC").fetchall()
    assert [event_type for _, event_type in left] == ["Type1", "Parked"]


async def test_a_row_that_is_parked_while_its_cause_is_forgotten_keeps_its_group(
    rows: Rows, database: DatabaseSettings, stranger: psycopg.AsyncConnection
) -> None:
    row = rows.parked("1")
    rows.connection.execute("UPDATE outbox.message SET state = 'discarded' WHERE id = %s", [row])
    rows.connection.execute(AGE_ALL)
    await stranger.execute("UPDATE outbox.message SET state = 'parked' WHERE id = %s", [row])

    await round_of(database)
    await stranger.commit()

    assert [group.count for group in list_parked_groups(Tables(rows.connection, "outbox"))] == [1]


def test_retention_by_hand_forgets_them_with_its_role_alone(rows: Rows, database: DatabaseSettings) -> None:
    rows.connection.execute(SEEN, [OLD, 5])

    drop_old_days(database, {SENT: KEEP}, by="ada", why="disk")

    assert count(rows) == 0
    with granted_roles(rows.connection):
        rows.connection.execute(SEEN, [OLD, 5])
        with role(rows.connection, "outbox_relay"), pytest.raises(psycopg.errors.InsufficientPrivilege):
            rows.connection.execute("SELECT outbox.forget_failures(14)")
        rows.connection.execute("RESET ROLE")
        with role(rows.connection, "outbox_retention"):
            assert rows.connection.execute("SELECT outbox.forget_failures(14)").fetchone() == (5,)
