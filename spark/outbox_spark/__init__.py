"""Write DataFrames into business tables and the outbox, in one transaction and once; read the outbox.

    import outbox_spark

    outbox_spark.register(spark)
    invoices = outbox_spark.in_order(invoices, "customer_id", "issued_on", "line")
    invoices.write.format("outbox").mode("append").options(
        url="postgresql://user@host/database",
        dbtable="billing.invoice",
        aggregateType="customer",
        aggregateIdColumn="customer_id",
        eventType="InvoiceIssued",
        txnAppId="nightly-invoices",
        txnVersion="20261121",
    ).save()

    sent = spark.read.format("outbox").option("url", "postgresql://user@host/database").load()

`df.writeStream.format("outbox")` writes streams, `foreach_batch` names what a function writes of them.
`OutboxBatch` writes several DataFrames in one transaction. `differences` finds what a correction must write. `write`
and `read` are functions, which Spark 3.5 has, too.

A batch is named by `txnAppId` and `txnVersion`: a rerun or a restarted driver that writes it again under the same name
writes nothing. Executors need this package, pyarrow and the ADBC driver; the driver psycopg as well. No part uses RDDs
or py4j, so that Spark Connect serves too.
"""

from typing import TYPE_CHECKING, Any

try:
    from pyspark.sql import DataFrame, SparkSession

    from outbox_spark.asked import WriteLimits
    from outbox_spark.correction import differences
    from outbox_spark.errors import (
        BatchError,
        ColumnError,
        CommitUnknownError,
        OptionError,
        OutboxWriteError,
        ReadError,
        RowError,
        SparkReleaseError,
        TableError,
        reason,
    )
    from outbox_spark.source import OutboxDataSource
    from outbox_spark.spark_api import require_sources
    from outbox_spark.workers import name_python
except ModuleNotFoundError as error:
    # Where Spark is, it stays: a second PySpark would break a cluster that brings it.
    library = str(error.name).partition(".")[0]
    extra = "spark" if library == "pyspark" else "spark-cluster"
    raise ImportError(f'{library} is not installed: pip install "outbox-relay[{extra}]"', name=library) from error

if TYPE_CHECKING:
    from outbox_spark.batch import OutboxBatch
    from outbox_spark.foreach import MicroBatch, foreach_batch
    from outbox_spark.frames import Events
    from outbox_spark.functions import read, write
    from outbox_spark.ledger import Batch
    from outbox_spark.result import Result
    from outbox_spark.rows import message_id

__all__ = [
    "BatchError",
    "ColumnError",
    "CommitUnknownError",
    "Events",
    "MicroBatch",
    "OptionError",
    "OutboxBatch",
    "OutboxDataSource",
    "OutboxWriteError",
    "ReadError",
    "RowError",
    "SparkReleaseError",
    "TableError",
    "WriteLimits",
    "committed",
    "differences",
    "foreach_batch",
    "in_order",
    "last_result",
    "message_id",
    "read",
    "reason",
    "register",
    "write",
]


def __getattr__(name: str) -> Any:
    # On the driver, where psycopg is: executors import this package and have no psycopg.
    if name == "OutboxBatch":
        from outbox_spark.batch import OutboxBatch  # noqa: PLC0415

        return OutboxBatch
    if name == "Events":
        from outbox_spark.frames import Events  # noqa: PLC0415

        return Events
    if name == "message_id":
        from outbox_spark.rows import message_id  # noqa: PLC0415

        return message_id
    if name in {"MicroBatch", "foreach_batch"}:
        from outbox_spark import foreach  # noqa: PLC0415

        return getattr(foreach, name)
    if name in {"read", "write"}:
        from outbox_spark import functions  # noqa: PLC0415

        return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(spark: SparkSession) -> None:
    """Make the format `outbox` known to the session, and to this thread: each thread that uses it calls this.

    Workers on this host get the Python that runs here, unless PYSPARK_PYTHON or spark.pyspark.python names another.

    Raises:
        SparkReleaseError: Spark is older than 4.0, and takes `write`, `read`, `OutboxBatch` and `foreach_batch`.
    """
    require_sources()
    name_python(spark)
    spark.dataSource.register(OutboxDataSource)
    # Spark looks a format up in the session that is active in the thread. Of PySpark this alone makes it so.
    spark.createDataFrame([], "nothing int")


def in_order(frame: DataFrame, key: str, *sequence: str, partitions: int | None = None) -> DataFrame:
    """Return the DataFrame with all rows of a key in one partition, and there in the order of `sequence`.

    Written from such a DataFrame, the events of a key have ids, and so reach the broker, in that order. A Python data
    source cannot ask Spark for an order.
    """
    if not sequence:
        raise ValueError("in_order takes at least one column that tells the order of a key's events")
    together = frame.repartition(key) if partitions is None else frame.repartition(partitions, key)
    return together.sortWithinPartitions(key, *sequence)


def committed(url: str, app_id: str, version: int, *, outbox_schema: str = "outbox") -> "Batch | None":
    """Return the committed batch of that name; None when it is not committed. On the driver.

    A job asks this first, so that a batch run again costs no work at all.

    Raises:
        OptionError: no batch has such a version.
    """
    from outbox_spark.asked import check_version  # noqa: PLC0415
    from outbox_spark.connection import connect, conninfo  # noqa: PLC0415
    from outbox_spark.ledger import read as read_ledger  # noqa: PLC0415  # executors have no psycopg

    check_version(version)
    with connect(conninfo(url)) as connection:
        return read_ledger(connection, outbox_schema, app_id, version)


def last_result(url: str, app_id: str, version: int, *, outbox_schema: str = "outbox") -> "Result | None":
    """Return whether the last run under that name wrote the batch or recognised it; None when it is not committed.

    It asks the ledger, which counts repeats where the role may change row_counts. On the driver.

    Raises:
        OptionError: no batch has such a version.
    """
    from outbox_spark.result import Result  # noqa: PLC0415

    found = committed(url, app_id, version, outbox_schema=outbox_schema)
    return None if found is None else Result.last(found)
