"""What the archive costs: bytes, seconds and CPU time of an event, with `outbox-spark archive` as its user runs it.

    python -m bench.archive

A private PostgreSQL (`fsync` on) holds closed days of sent rows, each an InvoiceIssued of one of CDNOW's purchases. A
day has each purchase once or several times, under other invoice ids. The job archives a day of one copy, and one of
many. What the rows of the second cost more, divided by their number, is the cost of an event, without Spark's start.
"""

import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import psycopg

from bench.frame.error import BenchmarkError
from bench.frame.processes import cpu_seconds
from bench.frame.run import Bench, Column, Count, Figures, Run, main
from bench.frame.servers import private_postgres
from bench.frame.spark_session import use_java
from relay.testing.servers.folders import temporary_folder
from tests.support.days import ADD_DAY, NAME
from tests.support.purchases import purchases

JOB = Path(__file__).resolve().parents[1] / "spark" / "outbox_spark" / "jobs" / "archive.py"
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


def measure(*, copies: Count = 30, run: Bench) -> None:
    """Measure what the archive costs.

    Parameters
    ----------
    copies
        How often the larger day has each of the 69,659 purchases, twice at least.
    """
    if copies < 2:
        raise BenchmarkError("--copies takes at least 2: a day is compared with one that has each purchase once")
    use_java()
    titles = {
        "the job, s": "seconds",
        "COPY TO, s": "copy_seconds",
        "CPU of Spark, s": "spark_cpu",
        "CPU of PostgreSQL, s": "postgres_cpu",
    }
    columns = (Column(title, figure, 1) for title, figure in titles.items())
    archived = run.table("The job, next to COPY TO", *columns, Column("events", "events"))
    cost = run.table("An event", Column("cost", "cost", 1))
    with (
        temporary_folder() as folder,
        private_postgres(run) as postgres,
        psycopg.connect(postgres[1], autocommit=True) as connection,
    ):
        _load_purchases(connection)
        days = {}
        for name, ago, number in (("each purchase once", 4, 1), (f"{copies} times", 3, copies)):
            days[name] = _archive(run, connection, postgres, folder, ago=ago, copies=number)
            archived.add(name, days[name])
    small, large = days.values()
    for name, figure in (
        ("payload", "payload_bytes"),
        ("row and indexes", "table_bytes"),
        ("Parquet", "parquet_bytes"),
    ):
        cost.add(f"{name}, bytes", {"cost": large[figure] / large["events"]})
    more = large["events"] - small["events"]
    for title, figure in titles.items():
        cost.add(f"{title.removesuffix(', s')}, us", {"cost": 1e6 * (large[figure] - small[figure]) / more})


def _load_purchases(connection: psycopg.Connection) -> None:
    connection.execute(PURCHASES)
    with connection.cursor() as cursor, cursor.copy("COPY purchase FROM STDIN") as copy:
        for number, line in enumerate(purchases().read_text().splitlines()):
            if number > 0:  # the first one names the columns
                copy.write_row((number, *line.split()))


def _archive(
    run: Run, connection: psycopg.Connection, postgres: tuple[int, str], folder: Path, *, ago: int, copies: int
) -> Figures:
    postgres_pid, url = postgres
    with run.status(f"filling a day, {copies} of each purchase"):
        ((midnight,),) = connection.execute(ADD_DAY, {"ago": ago}).fetchall()
        connection.execute(FILL, {"midnight": midnight, "copies": copies})
        ((table,),) = connection.execute(NAME, ["message_sent", ago]).fetchall()
        connection.execute(f"VACUUM (FREEZE, ANALYZE) outbox.{table}".encode())
        connection.execute("CHECKPOINT")
        ((events, payload_bytes, table_bytes),) = connection.execute(SIZES.format(table).encode()).fetchall()
        ((day,),) = connection.execute(DAY, [ago]).fetchall()
    with run.status(f"copying {events:,} events"):
        copy_seconds = _copy(connection, table, folder / "copy")
    with run.status(f"archiving {events:,} events"), (folder / "log").open("ab") as log:
        before, spark_cpu, started = cpu_seconds(postgres_pid), 0.0, monotonic()
        command = [sys.executable, str(JOB), "--path", str(folder / "archive"), "--day", day]
        job = subprocess.Popen([*command, "--url", url], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        while job.poll() is None:
            spark_cpu = max(spark_cpu, cpu_seconds(job.pid))
            sleep(0.1)
        seconds, postgres_cpu = monotonic() - started, cpu_seconds(postgres_pid) - before
    if job.returncode:
        raise BenchmarkError(f"the job has failed: {(folder / 'log').read_text().splitlines()[-1]}")
    parquet_bytes = sum(file.stat().st_size for file in (folder / "archive" / f"day={day}").rglob("*.parquet"))
    return {
        "events": events,
        "payload_bytes": payload_bytes,
        "table_bytes": table_bytes,  # with indexes
        "parquet_bytes": parquet_bytes,
        "copy_seconds": copy_seconds,  # COPY of the day into a file: the reference
        "seconds": seconds,
        "spark_cpu": spark_cpu,
        "postgres_cpu": postgres_cpu,
    }


def _copy(connection: psycopg.Connection, table: str, file: Path) -> float:
    started = monotonic()
    statement = f"COPY outbox.{table} TO STDOUT".encode()
    with connection.cursor() as cursor, cursor.copy(statement) as copy, file.open("wb") as written:
        written.writelines(copy)
    seconds = monotonic() - started
    file.unlink()
    return seconds


if __name__ == "__main__":
    main(measure)
