"""Names of Spark's batches go when no rerun asks for them any more, and never one that a stream is known by."""

import psycopg
import pytest
from structlog.testing import capture_logs

from relay.config.settings import DatabaseSettings
from relay.retention.rounds import drop_old_days
from tests.support.days import Days
from tests.support.roles import granted_roles, role

KEEP = 400  # days
LEDGER = """
    INSERT INTO outbox.batch (app_id, version, partition, partitions, token, row_counts, committed_at)
    SELECT name, version, piece, 1, gen_random_uuid(), '{}', now() - age * interval '1 day'
    FROM unnest(%s::text[], %s::int[], %s::int[], %s::int[]) AS made (name, version, piece, age)
"""
GIVE_UP = "UPDATE outbox.batch SET given_up_at = committed_at WHERE app_id = ANY (%s) AND partition = -2"
LEFT = "SELECT app_id, version, partition FROM outbox.batch ORDER BY 1, 2, 3"
UNNAMED = "save-0b9f7a52-6a0f-4c6e-9f0b-5a3c1d2e4f60"
WHOLE, BEGUN, QUERY = -1, -2, -3
OLD, NEW = KEEP + 1, KEEP - 1

# name, version, partition, age in days, whether it stays
ROWS = [
    ("nightly", 1, WHOLE, OLD, False),
    ("nightly", 2, WHOLE, OLD, False),
    ("nightly", 3, WHOLE, NEW, True),
    ("stream", 8, WHOLE, OLD, False),
    ("stream", 9, WHOLE, OLD, True),  # the newest: a stream without its checkpoint is known by it
    ("query", 0, QUERY, OLD, True),
    ("query", 0, WHOLE, OLD, False),
    ("query", 4, WHOLE, OLD, True),
    (UNNAMED, 0, WHOLE, OLD, False),
    ("pieces", 1, BEGUN, OLD, False),
    ("pieces", 1, 0, OLD, False),
    ("pieces", 1, WHOLE, OLD, False),
    ("pieces", 2, BEGUN, OLD, False),  # nothing reads how a committed batch was begun
    ("pieces", 2, 0, OLD, False),
    ("pieces", 2, WHOLE, OLD, True),
    ("pieces", 3, BEGUN, NEW, True),
    ("pieces", 3, 0, NEW, True),
    ("begun", 1, BEGUN, OLD, True),
    ("begun", 1, 0, OLD, True),
    ("begun", 2, WHOLE, NEW, True),
    ("given", 1, BEGUN, OLD, False),
    ("given", 1, 0, OLD, False),
    ("given", 2, WHOLE, OLD, True),
    ("last given", 1, WHOLE, OLD, True),  # no later one is committed
    ("last given", 2, BEGUN, OLD, True),
    ("last given", 2, 0, OLD, True),
]


@pytest.fixture
def ledger(days: Days) -> Days:
    pieces_first = sorted(ROWS, key=lambda row: row[2] == WHOLE)
    *columns, _ = (list(each) for each in zip(*pieces_first, strict=True))
    days.connection.execute(LEDGER, columns)
    days.connection.execute(GIVE_UP, [["given", "last given"]])
    return days


@pytest.mark.every_postgres
async def test_a_name_goes_when_it_is_old_and_a_later_one_is_committed(
    ledger: Days, database: DatabaseSettings
) -> None:
    with capture_logs() as events:
        await drop_old_days(database, {}, KEEP)
    left = ledger.connection.execute(LEFT).fetchall()
    await drop_old_days(database, {}, KEEP)

    assert left == sorted(row[:3] for row in ROWS if row[4])
    assert {"event": "retention.batches_forgotten", "log_level": "info", "batches": 7} in events
    assert ledger.connection.execute(LEFT).fetchall() == left


async def test_without_the_setting_every_name_stays(ledger: Days, database: DatabaseSettings) -> None:
    await drop_old_days(database, {}, None)

    assert len(ledger.connection.execute(LEFT).fetchall()) == len(ROWS)


async def test_only_the_role_of_retention_may_forget_a_batch(ledger: Days) -> None:
    with granted_roles(ledger.connection):
        with role(ledger.connection, "outbox_spark"), pytest.raises(psycopg.errors.InsufficientPrivilege):
            ledger.connection.execute("SELECT outbox.forget_batches(1, false)")
        with role(ledger.connection, "outbox_retention"):
            told = ledger.connection.execute("SELECT outbox.forget_batches(400, true)").fetchone()

    assert told == (7,)
    assert len(ledger.connection.execute(LEFT).fetchall()) == len(ROWS)
