"""The jobs by `spark-submit` on the cluster; all that its executors have of this project is the zip of the package."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.spark.cluster.driver import SETTINGS
from tests.spark.frames import one
from tests.spark.running import file_of
from tests.spark.sent import add_sent
from tests.support.spark_cluster import OF_DRIVERS, PYSPARK, SparkCluster, environment, package_zip, python_with

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]

PENDING = "SELECT count(*) FROM outbox.message WHERE state = 'pending'"
PURCHASES = " 00001 19970101  1   11.77\n 00002 19970112  1   12.00\n this is no purchase\n 00002 19970112  5   77.00\n"
TOLD_APART_BY = ("--key-column", "invoice_id", "--amount-column", "amount", "--day-column", "issued_on")

Submit = Callable[..., str]


@pytest.fixture
def submit(cluster: SparkCluster, database_url: str, tmp_path: Path) -> Submit:
    """Run a job to its end on the test's database, and give the last line that it printed."""
    python = python_with(tmp_path / "python", OF_DRIVERS)
    settings = [f"--conf={key}={value}" for key, value in SETTINGS.items()]
    command = [str(PYSPARK / "bin" / "spark-submit"), "--master", cluster.master_url, *settings]
    command += ["--py-files", str(package_zip(tmp_path))]
    own = {**environment(python, tmp_path), "RELAY_DATABASE_URL": database_url}

    def run(job: str, *arguments: str) -> str:
        done = subprocess.run(
            [*command, str(file_of(job)), *arguments], check=False, capture_output=True, text=True, env=own
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1]  # spark-submit brings both streams of the job there

    return run


def test_what_is_archived_goes_out_again(submit: Submit, connection: psycopg.Connection, tmp_path: Path) -> None:
    """On a cluster, a day that was archived and dropped is replayed in full from its archive."""
    add_sent(connection, "2026-11-01", 300)
    archive = str(tmp_path / "archive")

    archived = json.loads(submit("archive.py", "--path", archive))
    connection.execute("DROP TABLE outbox.message_sent_20261101")
    replayed = json.loads(submit("replay.py", "--day", "2026-11-01"))

    assert [day["rows"] for day in archived["archived"]] == [300]
    assert (replayed["rows"], one(connection, PENDING)) == (300, 300)


def test_purchases_become_invoices_that_are_reconciled(
    submit: Submit, connection: psycopg.Connection, tmp_path: Path
) -> None:
    """On a cluster, purchases become invoices with their events, a bad line is quarantined, and no day differs."""
    file = tmp_path / "purchases.txt"
    file.write_text(PURCHASES)

    written = json.loads(submit("invoices.py", "--input", str(file), "--app-id", "cdnow", "--version", "1"))
    report = submit("reconcile.py", "--table", "billing.invoice", *TOLD_APART_BY, "--event-type", "InvoiceIssued")

    assert (written["invoices"], written["outbox_rows"], written["quarantined"]) == (3, 3, 1)
    assert one(connection, PENDING) == 3
    assert "0 of 2 days differ" in report
