"""`python -m demo [--fresh]`: the main job on real data, from the file to the reconciliation."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg
from rich.console import Console
from rich.markup import escape

from demo import queue, stages
from demo.rates import Stage, rate_table, read_clock, read_stages
from demo.reconcile import Processes, Reconciliation, count_purchases, count_tables
from demo.report import Report
from demo.servers import BROKER_URL, DATABASE_URL, PLACE, one_demo_at_a_time, servers, start_over
from relay.config.loading import load
from relay.errors import BrokerUnavailableError, DatabaseUnavailableError, OutboxError
from relay.operate.schema.migrate import migrate
from relay.testing.servers.process import ServerError
from tests.support.purchases import purchases

TABLES = Path(__file__).resolve().parents[1] / "examples" / "pipeline" / "billing.sql"


def main(arguments: list[str]) -> int:
    """Run the demo; 0 when everything adds up, 1 when not or when a step failed, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs wrote")
    parser.add_argument("--input", type=Path, help="another file of the same shape, for a demo that starts fresh")
    options = parser.parse_args(arguments)
    console = Console()
    logging.getLogger("aiormq").addHandler(logging.NullHandler())  # it prints what it also raises
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        with one_demo_at_a_time():
            if options.fresh:
                start_over()
            return run(Report(console), options.input)
    except (ServerError, OutboxError, psycopg.Error) as error:
        console.print(f"[red]✗[/] {escape(str(error))}{_remedy(error)}", highlight=False, soft_wrap=True)
        console.print(f"The logs are in {PLACE}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left running. `make demo` goes on from here.", highlight=False)
        return 130


def run(report: Report, file: Path | None = None) -> int:
    """Do one step after the other; every server and process ends with this call."""
    if file is None:
        with report.step("Purchases of CDNOW") as step:
            file = purchases()
            step.note("the file in the wheel `lifetimes`")
    with servers(report) as environment:
        reconciliation, rates = carry(report, environment, file)
    return conclude(report, reconciliation, rates)


def carry(report: Report, environment: Mapping[str, str], file: Path) -> tuple[Reconciliation, list[Stage]]:
    """Carry the purchases from the file to the projection, and count."""
    settings = load(environ=environment).settings
    database_url = environment["RELAY_DATABASE_URL"]
    with report.step("relay migrate"):
        migrate(settings.database)
        with psycopg.connect(database_url) as connection:
            connection.execute(TABLES.read_bytes())
    with report.step("Queue") as step:
        queue.declare(settings.broker)
        step.note(f"{queue.QUEUE}, a quorum queue bound to the exchange {settings.broker.exchange}")
    since, before = read_clock(database_url), count_tables(database_url)
    with ExitStack() as processes:
        with report.step("relay run, and a consumer"):
            relay = processes.enter_context(stages.running_relay(environment))
            consumer = processes.enter_context(stages.running_consumer(environment))
        with report.step("Spark: file to outbox") as spark:
            summary = stages.run_spark(file, environment, spark)
            spark.note(_what_spark_did(summary))
        with report.step("relay and consumer: the rest") as step:
            stages.wait_until_projected(database_url, [relay, consumer], step)
        with report.step("relay replay: a customer") as step:
            stages.replay_a_customer(database_url, environment, [relay, consumer], step)
    stages.require_good_end(relay, consumer)
    counts, after = stages.consumer_counts(), count_tables(database_url)
    run = Processes(
        applied=counts["applied"],
        duplicates=counts["duplicates"],
        left_in_queue=queue.depth(settings.broker),
    )
    loaded = after.written - before.written
    rates = [
        Stage("Spark, from start to end", loaded, spark.seconds),
        Stage("Spark: of it, write both tables and commit", loaded, summary.get("write_seconds")),
        *read_stages(database_url, since),
    ]
    return Reconciliation(count_purchases(file, database_url), before, after, run), rates


def conclude(report: Report, reconciliation: Reconciliation, rates: list[Stage]) -> int:
    """Show the counts, and say what they mean: 0 when they add up."""
    report.console.print(reconciliation.table())
    if any(stage.rows for stage in rates):
        report.console.print(rate_table(rates))
    if problems := reconciliation.problems():
        for problem in problems:
            report.say(f"[red]✗ does not hold:[/] {problem}")
        return 1
    report.say("[green]✓ It adds up: nothing lost, nothing doubled, the money is the same at both ends.[/]")
    return 0


def _what_spark_did(summary: dict[str, Any]) -> str:
    if summary["recognised"]:
        return "the batch is in the ledger: recognised, nothing written"
    return f"{summary['invoices']:,} invoices and events, {summary['quarantined']:,} lines in quarantine"


def _remedy(error: Exception) -> str:
    match error:
        case DatabaseUnavailableError():
            variable = DATABASE_URL
        case BrokerUnavailableError():
            variable = BROKER_URL
        case _:
            return ""
    return f"; check {variable}" if os.environ.get(variable) else ""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
