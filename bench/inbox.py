"""What the inbox costs by the day of its messages, next to one without days: `python -m bench.inbox`."""

import time
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from uuid import uuid4

import psycopg
from psycopg.sql import SQL, Composed, Identifier

from bench.frame.processes import CpuMeter, wait_idle
from bench.frame.run import Bench, Column, Count, CountOrNone, Figures, Shown, main
from bench.frame.servers import private_postgres
from relay.config.settings import DatabaseSettings
from relay.consume.apply.inbox import EVERYTHING, Inbox

DAYS = 30  # that are remembered
BATCHES = (1, 100)  # messages a transaction

# As the inbox was before its days (migration 0006).
MAKE_UNDIVIDED = """
    CREATE SCHEMA undivided;
    CREATE TABLE undivided.processed_message (
        consumer_name text NOT NULL,
        message_id uuid NOT NULL,
        processed_at timestamptz NOT NULL DEFAULT now(),
        business_key text,
        PRIMARY KEY (consumer_name, message_id)
    )
"""
REMEMBER_UNDIVIDED = """
    INSERT INTO {schema}.processed_message (consumer_name, message_id, business_key)
    SELECT %(consumer)s, message_id, business_key
    FROM unnest(%(message_ids)s::uuid[], %(business_keys)s::text[]) AS arrived (message_id, business_key)
    ORDER BY message_id
    ON CONFLICT (consumer_name, message_id) DO NOTHING
    RETURNING message_id
"""
MAKE_DAYS = "SELECT outbox.ensure_inbox_days(%(today)s - %(days)s, %(days)s + 1)"
FILL = """
    INSERT INTO outbox.processed_message (consumer_name, message_id, message_day, business_key)
    SELECT 'bench', gen_random_uuid(), %(today)s - (n %% %(days)s), n::text FROM generate_series(1, %(rows)s) AS n
"""
COPY = """
    INSERT INTO undivided.processed_message (consumer_name, message_id, business_key)
    SELECT consumer_name, message_id, business_key FROM outbox.processed_message
"""
CLEAR_UP = "VACUUM (FREEZE, ANALYZE)"

STATEMENTS = {
    "undivided": SQL(REMEMBER_UNDIVIDED).format(schema=Identifier("undivided")),
    "by day": EVERYTHING.statement(Inbox(DatabaseSettings(), "bench")),
}


@dataclass(frozen=True, slots=True)
class Inboxes:
    """Both inboxes, filled alike."""

    postgres_pid: int
    connection: psycopg.Connection
    today: date
    seconds: float


def measure(*, rounds: Count = 3, seconds: Count = 5, remembered: CountOrNone = 1_000_000, run: Bench) -> None:
    """Measure what the inbox costs by days.

    Parameters
    ----------
    rounds
        How often each side is measured; the sides alternate.
    seconds
        For how long each.
    remembered
        Messages of the last 30 days that both inboxes know already.
    """
    remembering = run.table(
        f"REMEMBER alone, {remembered:,} messages of {DAYS} days known",
        Column("messages/s", "rate"),
        Column("of undivided", "rate", 2, is_ratio=True),
        Column("server CPU, us a message", "server_cpu", 0, Shown.MEDIAN),
    )
    with private_postgres(run) as (postgres_pid, url):
        today = datetime.now(UTC).date()
        with psycopg.connect(url, autocommit=True) as connection:
            with run.status("filling both inboxes"):
                _prepare(connection, {"today": today, "days": DAYS, "rows": remembered})
            inboxes = Inboxes(postgres_pid, connection, today, seconds)
            for batch in BATCHES:
                sides = {
                    f"{name}, {batch} a transaction": partial(_measure, inboxes, statement, batch)
                    for name, statement in STATEMENTS.items()
                }
                remembering.measure(sides, rounds)


def _measure(inboxes: Inboxes, statement: Composed, batch: int) -> Figures:
    wait_idle(inboxes.postgres_pid)
    meter, started = CpuMeter(server=[inboxes.postgres_pid]), time.monotonic()
    done = _remember(inboxes.connection, statement, batch, inboxes.today, until=started + inboxes.seconds)
    return {"rate": done / (time.monotonic() - started), **meter.micros(done)}


def _prepare(connection: psycopg.Connection, values: dict[str, object]) -> None:
    connection.execute(MAKE_UNDIVIDED)
    connection.execute(MAKE_DAYS, values)
    connection.execute(FILL, values)
    connection.execute(COPY)
    connection.execute(CLEAR_UP)


def _remember(connection: psycopg.Connection, statement: Composed, batch: int, today: date, *, until: float) -> int:
    """Remember new messages of today until then; return their number."""
    done = 0
    while time.monotonic() < until:
        ids = [uuid4() for _ in range(batch)]
        keys = [str(done)] * batch
        values = {"consumer": "bench", "message_ids": ids, "days": [today] * batch}
        values |= {"business_keys": keys, "keys": keys}
        with connection.transaction():
            done += len(connection.execute(statement, values, binary=True).fetchall())
    return done


if __name__ == "__main__":
    main(measure)
