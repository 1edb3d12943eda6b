"""The processes of the demo: relay, consumer and Spark, each with its log in .demo/."""

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg

from demo.reconcile import APP_ID, VERSION, Tables, count_tables
from demo.report import Step
from demo.servers import PLACE
from tests.support.java import java_home
from tests.support.process import Process, ServerError

ROOT = PLACE.parent
COMMANDS = Path(sys.executable).parent  # of the .venv that runs us
NODE = "demo"
LOOK_EVERY = 0.5  # seconds
GIVE_UP_AFTER = 60.0  # seconds in which no message moved

IS_IN_LEDGER = "SELECT FROM outbox.batch WHERE app_id = %s AND version = %s"


@contextmanager
def running_relay(environment: Mapping[str, str]) -> Iterator[Process]:
    """Run `relay run`; at the end it drains."""
    environment = {**environment, "RELAY_RELAY__NODE": NODE, "RELAY_LOG__FORMAT": "json"}
    with _running("relay", [COMMANDS / "relay", "run"], environment) as relay:
        relay.wait_until(lambda: '"relay.ready"' in relay.log_end(), 30)
        yield relay


@contextmanager
def running_consumer(environment: Mapping[str, str]) -> Iterator[Process]:
    """Run demo/consumer.py; at the end it finishes its transactions and leaves its counts."""
    _counts_file().unlink(missing_ok=True)
    command: list[Path | str] = [sys.executable, "-m", "demo.consumer", _counts_file()]
    with _running("consumer", command, {**environment, "RELAY_LOG__FORMAT": "json"}) as consumer:
        yield consumer


def run_spark(purchases: Path, environment: Mapping[str, str], step: Step) -> None:
    """Run the pipeline of spark/jobs/invoices.py to its end.

    Raises:
        ServerError: it failed; the message shows the end of its log.
    """
    home = java_home()
    if home is None:
        raise ServerError("no Java 17-21 found; `tests/support/packages demo` installs one")
    job: list[Path | str] = [ROOT / "spark" / "jobs" / "invoices.py", "--input", purchases]
    options = ["--url", environment["RELAY_DATABASE_URL"], "--app-id", APP_ID, "--version", str(VERSION)]
    with _running(
        "spark",
        [COMMANDS / "spark-submit", *job, *options],
        {**environment, "JAVA_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "spark")},
    ) as spark:
        while spark.is_running():
            step.note(_last_words(spark))
            time.sleep(LOOK_EVERY)
        if spark.returncode:
            raise ServerError(f"spark-submit failed with code {spark.returncode}\n{spark.log_end()}")


def is_in_ledger(database_url: str) -> bool:
    """Tell whether the batch was committed before."""
    with psycopg.connect(database_url) as connection:
        return connection.execute(IS_IN_LEDGER, [APP_ID, VERSION]).rowcount == 1


def wait_until_projected(database_url: str, processes: list[Process], step: Step) -> Tables:
    """Return once everything written is sent and projected, or nothing has moved for a while: the rest is counting.

    Raises:
        ServerError: relay or consumer ended by itself.
    """
    seen, moved_at = None, time.monotonic()
    while True:
        tables = count_tables(database_url)
        step.note(f"sent {tables.sent:,}, projected {tables.projected:,} of {tables.written:,}")
        if tables.written == tables.sent + tables.parked and tables.projected >= tables.sent:
            return tables
        if tables != seen:
            seen, moved_at = tables, time.monotonic()
        elif time.monotonic() - moved_at > GIVE_UP_AFTER:
            return tables
        for process in processes:
            if not process.is_running():
                raise ServerError(f"{process.name} ended with code {process.returncode}\n{process.log_end()}")
        time.sleep(LOOK_EVERY)


def consumer_counts() -> dict[str, int]:
    """Give what the consumer counted: applied, duplicates, failed."""
    counts: dict[str, int] = json.loads(_counts_file().read_text())
    return counts


def _counts_file() -> Path:
    return PLACE / "consumer.json"


@contextmanager
def _running(name: str, command: Sequence[Path | str], environment: Mapping[str, str]) -> Iterator[Process]:
    log = PLACE / f"{name}.log"
    log.unlink(missing_ok=True)
    process = Process(command, log=log, environment=environment, folder=ROOT, name=name)
    try:
        yield process
    finally:
        process.stop(signal.SIGTERM)


def _last_words(process: Process) -> str:
    return process.log_end().rpartition("\n")[2][:100]
