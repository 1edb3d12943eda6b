"""The processes of the demo: relay, consumer, Spark and replay, each with its log in .demo/."""

import json
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg

from demo.reconcile import APP_ID, BATCH, VERSION
from demo.report import Step
from demo.servers import PLACE, ROOT
from relay.testing.servers.process import Process, ServerError, free_port
from tests.support.java import java_home

COMMANDS = Path(sys.executable).parent  # of the .venv that runs us
JOB = ROOT / "examples" / "pipeline" / "invoices.py"
NODE = "demo"
LOOK_EVERY = 0.5  # seconds
GIVE_UP_AFTER = 60.0  # seconds in which no message moved

COUNT_MOVED = """
    SELECT
        (SELECT messages FROM outbox.message_count WHERE state = 'pending'),
        (SELECT count(*) FROM outbox.message_state
            WHERE state = 'sent' AND writer = %(app_id)s AND batch_id = %(version)s),
        (SELECT count(*) FROM billing.invoice_projection)
"""
BUSIEST_CUSTOMER = "SELECT customer_id FROM billing.invoice GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT 1"


@contextmanager
def running_relay(environment: Mapping[str, str]) -> Iterator[Process]:
    """Run `relay run`; at the end it drains."""
    environment = {**environment, "RELAY_NODE": NODE, "RELAY_LOG_FORMAT": "json"}
    with _running("relay", [COMMANDS / "relay", "run"], environment) as relay:
        relay.wait_until(lambda: '"relay.ready"' in relay.log_end(), 30)
        yield relay


@contextmanager
def running_consumer(environment: Mapping[str, str]) -> Iterator[Process]:
    """Run demo/consumer.py; at the end it finishes its transactions and leaves its counts."""
    _counts_file().unlink(missing_ok=True)
    command: list[Path | str] = [sys.executable, "-m", "demo.consumer", _counts_file()]
    with _running("consumer", command, {**environment, "RELAY_LOG_FORMAT": "json"}) as consumer:
        yield consumer


@contextmanager
def running_shop(environment: Mapping[str, str]) -> Iterator[Process]:
    """Run demo/shop.py; at the end it finishes its transactions."""
    with _running("shop", [sys.executable, "-m", "demo.shop"], environment) as consumer:
        yield consumer


def run_command(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Run a command of the relay to its end; its log is named `name`."""
    with _running(name, [COMMANDS / "relay", *arguments], environment) as command:
        while command.is_running():
            time.sleep(LOOK_EVERY)
    return command


def run_spark(purchases: Path, environment: Mapping[str, str], step: Step) -> dict[str, Any]:
    """Run examples/pipeline/invoices.py to its end and give its summary; the database is in the environment.

    Raises:
        ServerError: it failed; the message shows the end of its log.
    """
    home = java_home()
    if home is None:
        raise ServerError("no Java 17-21 found; `tests/support/packages demo` installs one")
    page = f"http://127.0.0.1:{(port := free_port())}"
    spark_options = ["--conf", f"spark.ui.port={port}", "--conf", "spark.ui.showConsoleProgress=false"]
    batch = ["--app-id", APP_ID, "--version", str(VERSION)]
    with _running(
        "spark",
        [
            COMMANDS / "spark-submit",
            *spark_options,
            JOB,
            "--input",
            purchases,
            *batch,
        ],
        {
            **environment,
            "JAVA_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT / "spark"),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
    ) as spark:
        while spark.is_running():
            step.note(_running_stage(page))
            time.sleep(LOOK_EVERY)
    if spark.returncode:
        raise ServerError(f"spark-submit failed with code {spark.returncode}\n{spark.log_end()}")
    summary: dict[str, Any] = json.loads(spark.log_end().rpartition("\n")[2])
    return summary


def wait_until_projected(database_url: str, processes: list[Process], step: Step) -> None:
    """Return once nothing is pending and all that is sent is projected, or nothing moved for a while.

    Which of the two it is, and whether it is right, is not decided here but by counting it all.

    Raises:
        ServerError: relay or consumer ended by itself.
    """
    with psycopg.connect(database_url, autocommit=True) as connection:

        def look() -> tuple[Hashable, bool]:
            moved = connection.execute(COUNT_MOVED, BATCH).fetchone()
            assert moved is not None, "a SELECT of counts gives one row"
            pending, sent, projected = moved
            step.note(f"{pending:,} pending, {sent:,} sent, {projected:,} projected")
            return moved, pending == 0 and projected >= sent

        _wait_while_it_moves(look, processes)


def replay_a_customer(database_url: str, environment: Mapping[str, str], processes: list[Process], step: Step) -> None:
    """Send the history of the customer with the most invoices again, and wait until the consumer has had it all.

    Raises:
        ServerError: the replay failed, or relay or consumer ended by itself.
    """
    with psycopg.connect(database_url) as connection:
        found = connection.execute(BUSIEST_CUSTOMER).fetchone()
    if found is None:
        step.note("nobody has bought anything")
        return
    (customer,) = found
    absorbed_before = consumer_counts()["duplicates"]
    command = ["replay", "--aggregate-type", "customer", "--aggregate-id", customer, "--output", "json"]
    replay = run_command("replay", command, {**environment, "RELAY_LOG_FORMAT": "json"})
    if replay.returncode:
        raise ServerError(f"relay replay failed with code {replay.returncode}\n{replay.log_end()}")
    replayed: int = json.loads(replay.log_end().rpartition("\n")[2])["done"]

    def look() -> tuple[Hashable, bool]:
        absorbed = consumer_counts()["duplicates"] - absorbed_before
        step.note(f"customer {customer}: {replayed:,} rows replayed, {absorbed:,} absorbed")
        return absorbed, absorbed >= replayed

    _wait_while_it_moves(look, processes)


def consumer_counts() -> dict[str, int]:
    """Return what the consumer has counted until now: applied, duplicates, failed."""
    counts: dict[str, int] = json.loads(_counts_file().read_text())
    return counts


def require_good_end(*processes: Process) -> None:
    """See that they ended as they should when they are told to: drained, with code 0.

    Raises:
        ServerError: one did not; the message shows the end of its log.
    """
    for process in processes:
        if process.returncode:
            raise ServerError(
                f"{process.name} was told to drain and ended with code {process.returncode}\n{process.log_end()}"
            )


def _wait_while_it_moves(look: Callable[[], tuple[Hashable, bool]], processes: list[Process]) -> None:
    """Look until all is done, or until what is seen has been the same for GIVE_UP_AFTER."""
    seen, moved_at = None, time.monotonic()
    while time.monotonic() - moved_at < GIVE_UP_AFTER:
        moved, is_done = look()
        if is_done:
            return
        if moved != seen:
            seen, moved_at = moved, time.monotonic()
        for process in processes:
            if not process.is_running():
                raise ServerError(f"{process.name} ended with code {process.returncode}\n{process.log_end()}")
        time.sleep(LOOK_EVERY)


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


def _running_stage(page: str) -> str:
    """Return what Spark is at, by its web page; until it has begun, the address of the page."""
    try:
        with urlopen(f"{page}/api/v1/applications", timeout=1) as answer:
            (application,) = json.load(answer)
        with urlopen(f"{page}/api/v1/applications/{application['id']}/jobs?status=running", timeout=1) as answer:
            jobs = json.load(answer)
    except (OSError, ValueError):
        return "starting"  # or ending: the page is there only in between
    return f"{jobs[0].get('description', '')} ({page})" if jobs else page
