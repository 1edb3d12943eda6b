"""The files that a newcomer opens to follow one row of `df.write.format("outbox").save()` to its commit."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace

import psycopg
import pytest
from pyspark.sql import SparkSession

import outbox_spark
from outbox_spark import source
from tests.spark.frames import counts, invoices

PACKAGE = Path(outbox_spark.__file__).parent


@contextmanager
def files_that_run() -> Iterator[set[str]]:
    """Note the files of the package whose functions are called; importing a file does not count."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_row_passes_through_ten_files(
    spark: SparkSession, options: dict[str, str], connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SimpleNamespace(get=lambda: SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 0))
    monkeypatch.setattr(source, "TaskContext", task)
    frame = invoices(spark, 5)
    rows = frame.toArrow().to_batches()
    outbox = source.OutboxDataSource({name.lower(): value for name, value in options.items()})

    with files_that_run() as files:
        writer = outbox.writer(frame.schema, overwrite=False)
        writer.commit([writer.write(iter(rows))])

    assert counts(connection) == (5, 5, 1)
    assert sorted(files) == [
        "commit.py",
        "connection.py",
        "ledger.py",
        "load.py",
        "options.py",
        "plan.py",
        "prepare.py",
        "rows.py",
        "source.py",
        "tables.py",
    ]
