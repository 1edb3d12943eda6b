"""What the inbox costs by the day of its messages, next to one without days: `python -m bench.inbox`."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from typing import Any
from uuid import uuid4

import psycopg
from cyclopts import App
from psycopg.sql import SQL, Composed, Identifier
from pydantic import SecretStr

from bench.frame import report
from bench.frame.command import Count, CountOrNone, main
from bench.frame.processes import cpu_seconds, wait_idle
from relay.config.settings import DatabaseSettings
from relay.consume.apply.inbox import Inbox
from relay.consume.apply.inbox_insert import EVERYTHING
from relay.operate.migrate import migrate
from tests.support.postgres import PostgresServer

BY_DAY, UNDIVIDED = "by day", "undivided"
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
    BY_DAY: EVERYTHING.statement(Inbox(DatabaseSettings(), "bench")),
    UNDIVIDED: SQL(REMEMBER_UNDIVIDED).format(schema=Identifier("undivided")),
}

app = App(name="python -m bench.inbox", help="Measure what the inbox costs by days.", version_flags=[])
console = report.open_console()


@dataclass(frozen=True, slots=True)
class Measured:
    """One case of one round."""

    case: str
    batch: int
    round: int
    rate: float  # messages a second
    server_us: float  # CPU time of the server a message


@app.default
def measure(*, rounds: Count = 3, seconds: Count = 5, remembered: CountOrNone = 1_000_000) -> int:
    """Print a table; write JSON to bench/results/.

    Parameters
    ----------
    rounds
        How often each case is measured; the cases alternate.
    seconds
        For how long each.
    remembered
        Messages of the last 30 days that both inboxes know already.
    """
    measured: list[Measured] = []
    with PostgresServer(durable=True) as postgres:
        url = postgres.create_database("bench")
        migrate(DatabaseSettings(url=SecretStr(url)))
        today = datetime.now(UTC).date()
        with psycopg.connect(url, autocommit=True) as connection:
            with console.status("filling both inboxes"):
                _prepare(connection, {"today": today, "days": DAYS, "rows": remembered})
            for number in range(rounds):
                for batch in BATCHES:
                    for case in (BY_DAY, UNDIVIDED) if number % 2 else (UNDIVIDED, BY_DAY):
                        with console.status(f"{case}, {batch} a transaction: round {number + 1} of {rounds}"):
                            wait_idle(postgres.pid)
                            started, cpu = time.monotonic(), cpu_seconds(postgres.pid)
                            done = _remember(connection, STATEMENTS[case], batch, today, until=started + seconds)
                            took, used = time.monotonic() - started, cpu_seconds(postgres.pid) - cpu
                        measured.append(Measured(case, batch, number + 1, done / took, used / done * 1e6))
    title = f"REMEMBER alone, {remembered:,} messages of {DAYS} days known; medians of {rounds} rounds"
    columns = ["", "messages a transaction", "messages a second", "of undivided", "server CPU, us a message"]
    report.print_table(console, title, columns, [_row(case, n, measured) for n in BATCHES for case in STATEMENTS])
    figures = {"options": {"rounds": rounds, "seconds": seconds, "remembered": remembered}}
    rows: list[dict[str, Any]] = [asdict(one) for one in measured]
    report.print_files(console, report.write_json("inbox", {**figures, "rounds": rows}))
    return 0


def _prepare(connection: psycopg.Connection, values: dict[str, object]) -> None:
    connection.execute(MAKE_UNDIVIDED)
    connection.execute(MAKE_DAYS, values)
    connection.execute(FILL, values)
    connection.execute(COPY)
    connection.execute(CLEAR_UP)


def _remember(connection: psycopg.Connection, statement: Composed, batch: int, today: date, *, until: float) -> int:
    """Remember new messages of today until then; give their number."""
    done = 0
    while time.monotonic() < until:
        ids = [uuid4() for _ in range(batch)]
        keys = [str(done)] * batch
        values = {"consumer": "bench", "message_ids": ids, "days": [today] * batch}
        values |= {"business_keys": keys, "keys": keys}
        with connection.transaction():
            done += len(connection.execute(statement, values, binary=True).fetchall())
    return done


def _row(case: str, batch: int, measured: Sequence[Measured]) -> list[str]:
    of = {name: [one for one in measured if (one.case, one.batch) == (name, batch)] for name in STATEMENTS}
    rates = report.spread([one.rate for one in of[case]])
    pairs = zip(of[case], of[UNDIVIDED], strict=True)
    ratio = report.spread([one.rate / other.rate for one, other in pairs])
    cpu = report.spread([one.server_us for one in of[case]])
    shares = f"{ratio.shown(2)} ({ratio.range_shown(2)})"
    return [case, str(batch), f"{rates.shown()} ({rates.range_shown()})", shares, cpu.shown()]


if __name__ == "__main__":
    main(app)
