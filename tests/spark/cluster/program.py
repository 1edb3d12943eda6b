"""A driver that does what a test tells it: `python program.py SOCKET`, where the test listens.

It sees nothing of this checkout but what `--py-files` brings. Its own definitions go to the executors by value, as
those of a notebook do.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

spark = SparkSession.builder.getOrCreate()  # before the import: the session puts the zip on the path

import outbox_spark  # noqa: E402
from outbox_spark.load import load_all  # noqa: E402
from outbox_spark.plan import Save, Staged  # noqa: E402
from outbox_spark.source import Attempt, OutboxWriter  # noqa: E402


@dataclass(frozen=True)
class StageFault:
    """What happens to the first attempts at one partition, or to the driver, when they reach a stage."""

    stage: str  # "before loading", "loading" (some rows are sent), "loaded", or of the driver "committing", "committed"
    folder: str  # where it tells that the stage is reached, and by which process, and is told to go on
    partition: int = 1
    attempts: int = 1
    fails: bool = False  # else it waits for the file `go`
    ports: tuple[int, int] | None = None  # these attempts reach the database by another port

    def is_for(self, context: TaskContext | None) -> bool:
        return context is None or (context.partitionId() == self.partition and context.attemptNumber() < self.attempts)

    def reach(self, stage: str) -> None:
        if stage != self.stage or not self.is_for(TaskContext.get()):
            return
        if self.fails:
            raise RuntimeError(f"asked to fail {stage}")
        note = Path(self.folder, f"unfinished-{os.getpid()}")  # two attempts may be here at once
        note.write_text(str(_parent(os.getppid())))  # of Python's daemon: the executor
        note.rename(Path(self.folder, stage))
        while not Path(self.folder, "go").exists():
            time.sleep(0.02)

    def loading(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(batches)
        self.reach("loading")
        yield from batches


def source_with(fault: StageFault) -> type[outbox_spark.OutboxDataSource]:
    class Writer(OutboxWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Attempt:
            if fault.ports is not None and fault.is_for(TaskContext.get()):
                here, there = fault.ports
                self._save = replace(self._save, info=self._save.info.replace(f"port={here}", f"port={there}"))
            fault.reach("before loading")
            staged = super().write(fault.loading(iterator))
            fault.reach("loaded")
            return staged

        def commit(self, messages: list[Attempt | None]) -> None:
            fault.reach("committing")
            super().commit(messages)
            fault.reach("committed")

    class Source(outbox_spark.OutboxDataSource):
        @classmethod
        def name(cls) -> str:
            return "outbox-with-fault"

        def writer(self, schema: StructType, overwrite: bool) -> OutboxWriter:
            writer = super().writer(schema, overwrite)
            return Writer(writer._save, is_recognised=writer._is_recognised)

    return Source


def save(rows: str, options: dict[str, str], fault: dict[str, Any] | None = None) -> None:
    source = outbox_spark.OutboxDataSource if fault is None else source_with(StageFault(**fault))
    spark.dataSource.register(source)
    spark.sql(rows).write.format(source.name()).mode("append").options(**options).save()


def several(rows: str, options: dict[str, str], fault: dict[str, Any] | None = None) -> None:
    """Write the same invoices as `save`, by OutboxBatch."""
    frame = spark.sql(rows)
    held = StageFault(**fault or {"stage": "", "folder": ""})

    def load_held(saves: Sequence[Save], batches: Iterable[pa.RecordBatch], **attempt: int) -> list[Staged]:
        held.reach("before loading")
        staged = load_all(saves, batches, **attempt)
        held.reach("loaded")
        return staged

    with (
        patch("outbox_spark.batch.load_all", load_held),
        outbox_spark.OutboxBatch(spark, url=options["url"], app_id="nightly", version=7) as batch,
    ):
        batch.rows(frame, table="billing.invoice")
        made = {"aggregate_type": "customer", "event_type": "InvoiceIssued"}
        batch.events(frame, function=_event, **made)


def read(url: str) -> list[tuple[Any, ...]]:
    outbox_spark.register(spark)
    rows = spark.read.format("outbox").options(url=url, numPartitions="2").load(schema="aggregate_id STRING, id BIGINT")
    return [tuple(row) for row in rows.collect()]


def executors() -> list[tuple[str, ...]]:
    """Return for each executor the place of its outbox_spark, and the errors of its Python without Spark's paths."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import outbox_spark

        list(batches)
        last_words = [
            subprocess.run(
                [sys.executable, "-c", f"import {name}"], check=False, capture_output=True, text=True
            ).stderr.splitlines()[-1]
            for name in ("outbox_spark", "psycopg")
        ]
        yield pa.RecordBatch.from_pydict({"a": [outbox_spark.__file__], "b": last_words[:1], "c": last_words[1:]})

    rows = spark.range(0, 2, 1, 2).mapInArrow(look, "a string, b string, c string").distinct()
    return [tuple(row) for row in rows.collect()]


def _event(row: dict[str, Any]) -> dict[str, Any]:
    payload = {"invoice_id": row["invoice_id"], "amount": str(row["amount"])}
    return {"aggregate_id": row["customer_id"], "payload": payload}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    with Client(sys.argv[1]) as test:
        test.send(spark.version)
        while True:
            name, arguments = test.recv()
            try:
                test.send((globals()[name](**arguments), None))
            except Exception as error:  # the test tells what it expected
                test.send((None, outbox_spark.reason(error) or str(error)))
