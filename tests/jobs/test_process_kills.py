"""A job over rows that is killed goes on where it was: counts exact, each row once, the audit complete."""

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psycopg
import pytest

from relay.jobs.job import Job, JobState, Kind, list_jobs, read_job
from relay.operate.parked.read import ParkedSelection
from relay.operate.parked.work import order_rows
from relay.operate.routes.quarantine import list_routes
from relay.operate.routes.work import order_discard
from relay.servers.postgres.tables import Tables
from tests.operate.rows import Rows
from tests.replay.conftest import Commands
from tests.support.eventually import eventually

KEYS, HELD = 4000, 2  # heads, and rows behind each
KILLS = 8
SEED_VARIABLE = "TEST_SEED"  # the seed of an earlier run, to run it again
PARK = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, parked_at, last_error)
    SELECT 'invoice', n::text, 'InvoiceIssued', '1', 'parked', now(), 'refused for ' || n
    FROM generate_series(1, %s) AS n
"""
HOLD = """
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, parked_at, held_behind)
    SELECT aggregate_type, aggregate_id, event_type, payload, 'parked', now(), id
    FROM outbox.message_parked, generate_series(1, %s)
"""
AUDIT = "SELECT count(*), count(DISTINCT target), count(DISTINCT job) FROM outbox.operator_audit WHERE command = %s"
STATES = "SELECT state, count(*) FROM outbox.message GROUP BY state ORDER BY state"
SET_ASIDE = """
    WITH route AS (
        INSERT INTO outbox.quarantine (exchange, routing_key, reason) VALUES ('', 'gone', '312 NO_ROUTE') RETURNING id
    )
    INSERT INTO outbox.message (aggregate_type, aggregate_id, event_type, payload, state, quarantine, routing_key)
    SELECT 'invoice', n::text, 'InvoiceIssued', '1', 'quarantined', route.id, 'gone'
    FROM route, generate_series(1, %s) AS n
"""
SESSIONS = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2"


@pytest.fixture
def relay(tmp_path: Path, database_url: str) -> Iterator[Commands]:
    commands = Commands(tmp_path, RELAY_DATABASE_URL=database_url, RELAY_LOG_FORMAT="json")
    yield commands
    commands.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
async def test_a_command_over_rows_that_is_told_to_stop_says_how_to_go_on(
    rows: Rows, connection: psycopg.Connection, relay: Commands, how: signal.Signals
) -> None:
    rows.connection.execute(PARK, [100])
    retrying = relay.start("parked", "retry", "--all", "--rate", "5")
    await eventually(lambda: any(job.done for job in list_jobs(Tables(connection, "outbox"), limit=1)), "some are done")

    retrying.tell(how)
    stopped = await relay.end(retrying)
    (job,) = list_jobs(Tables(connection, "outbox"), limit=1)

    assert stopped.code == 130
    assert f"retried {job.done} row" in stopped.said
    assert "`relay jobs resume 1` goes on" in stopped.said
    assert (job.state, 0 < job.done < 100) == (JobState.INTERRUPTED, True)
    assert rows.connection.execute(AUDIT, ["parked retry"]).fetchone() == (job.done, job.done, 1)


@pytest.mark.drills
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "state"), [(Kind.RETRY, "pending"), (Kind.ARCHIVE, "archived")])
async def test_a_killed_job_is_resumed_and_each_row_is_done_once(
    kind: Kind, state: str, rows: Rows, connection: psycopg.Connection, relay: Commands
) -> None:
    """A job over 4,000 keys is killed eight times: resumed, its counts are exact, and its audit is complete."""
    rows.connection.execute(PARK, [KEYS])
    rows.connection.execute(HOLD, [HELD])
    job = order_rows(Tables(connection, "outbox"), kind, ParkedSelection(), by="ada", why="drill")

    last = await killed_and_ended(job, rows, connection, relay=relay)

    assert (last.state, last.selected, last.done, last.released, last.failed) == ("done", KEYS, KEYS, KEYS * HELD, 0)
    assert rows.connection.execute(AUDIT, [f"parked {kind}"]).fetchone() == (KEYS, KEYS, 1)
    went = {state: KEYS, "pending": KEYS * HELD} if state != "pending" else {state: KEYS * (1 + HELD)}
    assert dict(rows.connection.execute(STATES).fetchall()) == went
    assert rows.connection.execute("SELECT count(*) FROM outbox.parked_failure").fetchone() == (0,)


@pytest.mark.drills
@pytest.mark.timeout(300)
async def test_a_killed_discard_of_a_route_is_resumed_and_each_row_is_done_once(
    rows: Rows, connection: psycopg.Connection, relay: Commands
) -> None:
    """A discard of a route's 4,000 rows is killed eight times: resumed, its counts and its audit are exact."""
    rows.connection.execute(SET_ASIDE, [KEYS])
    (route,) = list_routes(Tables(connection, "outbox"))
    job = order_discard(Tables(connection, "outbox"), route, [], by="ada", why="drill")

    last = await killed_and_ended(job, rows, connection, relay=relay)

    assert (last.state, last.selected, last.done, last.failed) == ("done", KEYS, KEYS, 0)
    assert rows.connection.execute(AUDIT, ["quarantine discard"]).fetchone() == (KEYS, KEYS, 1)
    assert dict(rows.connection.execute(STATES).fetchall()) == {"discarded": KEYS}


async def killed_and_ended(job: Job, rows: Rows, connection: psycopg.Connection, *, relay: Commands) -> Job:
    """Resume a job again and again, kill it in the middle of its work, and let it end; return it."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"{SEED_VARIABLE}={seed}")  # shown when the test fails
    chance = Random(seed)

    def done() -> int:
        return read_job(Tables(connection, "outbox"), job.id).done

    for number in range(KILLS):
        goal = min(KEYS - 1, (number + 1) * chance.randrange(1, KEYS // KILLS))
        resumed = relay.start("jobs", "resume", str(job.id))
        await eventually(lambda: done() >= goal or not resumed.is_running(), "some rows are done", 60)  # noqa: B023
        resumed.stop(signal.SIGKILL)
        await eventually(lambda: rows.connection.execute(SESSIONS).rowcount == 0, "the killed one's session is gone")
    before_last = read_job(Tables(connection, "outbox"), job.id)
    ended = await relay("jobs", "resume", str(job.id))

    assert ended.code in (0, 2), ended.said  # 2: the last kill came after the end
    assert before_last.state in ("interrupted", "done")
    return read_job(Tables(connection, "outbox"), job.id)
