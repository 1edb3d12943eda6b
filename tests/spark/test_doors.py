"""The files that a newcomer opens to follow one row of `df.write.format("outbox").save()` to its commit."""

import psycopg

from tests.spark.frames import counts
from tests.spark.one_row import follow_spark_row


def test_a_row_passes_through_fourteen_files(options: dict[str, str], connection: psycopg.Connection) -> None:
    opened = follow_spark_row(options)

    assert counts(connection) == (1, 1, 1)
    assert sorted(opened) == [
        "spark/outbox_spark/asked.py",
        "spark/outbox_spark/commit.py",
        "spark/outbox_spark/connection.py",
        "spark/outbox_spark/fits.py",
        "spark/outbox_spark/ledger.py",
        "spark/outbox_spark/load.py",
        "spark/outbox_spark/move.py",
        "spark/outbox_spark/options.py",
        "spark/outbox_spark/plan.py",
        "spark/outbox_spark/prepare.py",
        "spark/outbox_spark/result.py",
        "spark/outbox_spark/rows.py",
        "spark/outbox_spark/source.py",
        "spark/outbox_spark/tables.py",
    ]
