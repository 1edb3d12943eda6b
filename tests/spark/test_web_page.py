"""What a person sees of a write on Spark's own web page, read through the page's REST interface."""

import json
import signal
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from outbox_spark import OutboxBatch
from relay.testing.servers.process import Process, free_port, wait_for
from tests.spark.frames import WAITING_FOR_LOCK, counts, invoices, one, save
from tests.spark.releases import with_sources
from tests.spark.running import file_of, job_environment

STEPS = [
    "1 of 3: count the lines and purchases of purchases.txt",
    "2 of 3: write the lines that are no purchase to billing.quarantine",
    "3 of 3: write billing.invoice and its events to the outbox, in one transaction",
]


@pytest.mark.jobs
@pytest.mark.timeout(300)
def test_every_job_stage_and_query_of_the_pipeline_has_the_name_of_its_step(
    database_url: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    file = tmp_path / "purchases.txt"
    file.write_text("1 19970101 1 11.77\nthis is no purchase\n2 19970103 1 3.00\n")
    page = f"http://127.0.0.1:{(port := free_port())}"
    submit: list[str | Path] = [
        Path(sys.executable).with_name("spark-submit"),
        "--conf",
        f"spark.ui.port={port}",
        file_of("invoices.py"),
    ]
    with psycopg.connect(database_url) as lock:
        lock.execute("LOCK TABLE outbox.batch IN EXCLUSIVE MODE")  # the job stops at its commit, its page up
        job = Process(
            [*submit, "--input", str(file), "--url", database_url],
            log=tmp_path / "job.log",
            environment={**job_environment(), "SPARK_LOCAL_IP": "127.0.0.1"},
        )
        try:
            job.wait_until(lambda: one(connection, WAITING_FOR_LOCK) == 1, 180)
            (application,) = _read(page, "")
            place = f"/{application['id']}"
            wait_for(lambda: not _read(page, f"{place}/jobs?status=running"), "the page knows that the jobs ended", 20)
            jobs, queries = _read(page, f"{place}/jobs"), _read(page, f"{place}/sql")
            stages = _read(page, f"{place}/stages?status=complete")
            lock.commit()
            wait_for(lambda: not job.is_running(), "the job ends", 60)
        finally:
            job.stop(signal.SIGKILL)

    assert job.returncode == 0, job.log_end()
    assert counts(connection) == (2, 2, 1)
    summary = json.loads(job.log_end().splitlines()[-1])  # spark-submit brings both streams of the job there
    assert (summary["invoices"], summary["quarantined"]) == (2, 1)
    assert application["name"] == "invoices of purchases.txt"
    assert [query["description"] for query in queries] == STEPS
    for things in (jobs, stages):
        assert sorted({thing.get("description") for thing in things}, key=str) == STEPS


@with_sources
def test_a_write_shows_the_name_that_its_user_gave_it(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    name = f"write the invoices of {options['url'].rpartition('/')[2]}"
    spark.sparkContext.setJobDescription(name)
    try:
        save(invoices(spark), options)
    finally:
        spark.sparkContext.setJobDescription(None)

    page, place = spark.sparkContext.uiWebUrl, f"/{spark.sparkContext.applicationId}"

    def ended() -> list[Any]:
        queries = _read(page, f"{place}/sql?length=100000&planDescription=false")
        return [query for query in queries if query["description"] == name and query["status"] == "COMPLETED"]

    wait_for(lambda: bool(ended()), "the page knows that the write ended", 20)
    (query,) = ended()
    (job,) = (job for job in _read(page, f"{place}/jobs") if job.get("description") == name)
    (stage,) = (stage for stage in _read(page, f"{place}/stages") if stage.get("description") == name)
    assert (job["status"], job["numCompletedTasks"]) == ("SUCCEEDED", 4)
    assert stage["stageId"] in job["stageIds"]
    assert query["successJobIds"] == [job["jobId"]]
    assert query["nodes"][-1]["nodeName"] in {"AppendData outbox", "AppendData"}  # before 4.2 the latter


def test_the_jobs_of_a_batch_say_what_they_stage_unless_the_user_has_named_them(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection
) -> None:
    url = options["url"]
    name = f"nightly of {url.rpartition('/')[2]}"
    mine = f"{name}, as I call it"
    for version, given in ((1, None), (2, mine)):
        spark.sparkContext.setJobDescription(given)
        try:
            with OutboxBatch(spark, url=url, app_id=name, version=version) as batch:
                batch.rows(
                    invoices(spark, 5).withColumn("invoice_id", f.concat("invoice_id", f.lit(version))),
                    table="billing.invoice",
                )
            left = spark.sparkContext.getLocalProperty("spark.job.description")
        finally:
            spark.sparkContext.setJobDescription(None)
        assert left == given

    page, place = spark.sparkContext.uiWebUrl, f"/{spark.sparkContext.applicationId}"

    def named() -> list[str]:
        described = (job.get("description", "") for job in _read(page, f"{place}/jobs?status=succeeded"))
        return sorted(each for each in described if name in each)

    wait_for(lambda: len(named()) > 1, "the page knows of both", 20)
    assert named() == [f"batch {name} 1: stage billing.invoice", mine]


def _read(page: str, place: str) -> Any:
    with urlopen(f"{page}/api/v1/applications{place}", timeout=20) as answer:
        return json.load(answer)
