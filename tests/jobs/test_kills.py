"""A job with parked rows that is killed at any moment goes on where it was: each row once, and exact counts."""

import os
import secrets
import signal
import subprocess
from random import Random

import psycopg
import pytest

from tests.cli.command import Command
from tests.operate.rows import Rows
from tests.support.process import wait_for

HEADS, BEHIND = 3000, 2
SEED_VARIABLE = "TEST_SEED"  # the seed of an earlier run, to run it again
PARK = """
    WITH head AS (
        INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, parked_at, last_error)
        SELECT 'invoice', n::text, 'InvoiceIssued', '{}', 'parked', now(), 'returned' FROM generate_series(1, %s) AS n
        RETURNING id, aggregate_id
    )
    INSERT INTO outbox.message (
        aggregate_type, aggregate_id, event_type, payload, state, parked_at, last_error, held_behind
    )
    SELECT 'invoice', aggregate_id, 'InvoiceIssued', '{}', 'parked', now(), 'waits behind message ' || id, id
    FROM head, generate_series(1, %s)
"""
DONE = "SELECT coalesce(max(done), 0) FROM outbox.job"
HAS_LOCK = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted"


@pytest.mark.drills
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["retry", "archive"])
def test_kills_at_random_moments_do_each_row_once(relay: Command, rows: Rows, kind: str) -> None:
    """A bulk job is killed eight times; resumed, it has done each row once, and its counts and audit are exact."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"{SEED_VARIABLE}={seed}")  # shown when the test fails
    chance = Random(seed)
    rows.connection.execute(PARK, [HEADS, BEHIND])
    paced = ["--rate", "1000"]

    arguments = ["parked", kind, "--all", "--why", "a drill", *([] if kind == "retry" else ["--yes"])]
    for _ in range(8):
        before = value(rows, DONE)
        running = relay.start(*arguments, *paced)
        wanted = min(HEADS, before + chance.randrange(1, 300))
        wait_for(lambda: value(rows, DONE) >= wanted, "it has done some", 60)  # noqa: B023
        kill(running)
        wait_for(lambda: value(rows, HAS_LOCK) == 0, "the killed one's session is gone", 30)
        arguments = ["jobs", "resume", "1"]
    ended = relay(*arguments, "--rate", "100000")

    assert ended.code == 0, ended.err
    job = rows.connection.execute("SELECT state, selected, done, released FROM outbox.job").fetchall()
    audit = rows.connection.execute(
        "SELECT count(*), count(DISTINCT target), min(command) FROM outbox.operator_audit WHERE command LIKE 'parked %'"
    ).fetchone()
    assert job == [("done", HEADS, HEADS, HEADS * BEHIND)]
    assert audit == (HEADS, HEADS, f"parked {kind}")
    assert value(rows, "SELECT count(*) FROM outbox.parked_failure") == 0
    assert value(rows, "SELECT count(*) FROM outbox.message WHERE state = 'parked'") == 0


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def value(rows: Rows, query: str) -> int:
    row = psycopg.Cursor(rows.connection).execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])
